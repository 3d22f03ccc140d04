"""Seeds of prompts for self-generation: templates, and what fills their slots.

A slot is a name in braces; a digit after it asks for another value of the same kind: "{topic}
and {topic2}". "{passage}" is filled by the target itself, with its answer to one of `PASSAGES`.
Numbers are drawn. None of these are in the prompts that heads are evaluated on.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

PASSAGE = "{passage}"


def _items(text: str) -> tuple[str, ...]:
    """The comma-separated items of a block of text."""
    return tuple(" ".join(item.split()) for item in text.split(",") if item.strip())


TOPICS = _items("""
    volcanoes, tides, glaciers, coral reefs, deserts, rain forests, thunderstorms, earthquakes,
    the water cycle, photosynthesis, honey bees, migrating birds, whales, wolves, owls, spiders,
    mushrooms, oak trees, sunflowers, wild horses, penguins, elephants, sharks, butterflies,
    gravity, magnetism, electricity, sound waves, lasers, batteries, steam engines, bridges,
    skyscrapers, tunnels, railways, bicycles, sailing ships, submarines, hot-air balloons,
    satellites, the planet Mars, the Moon landing, black holes, comets, telescopes, the periodic
    table, acids and bases, enzymes, vaccines, antibiotics, the human heart, sleep, memory,
    dreams, stress, healthy eating, vitamins, running, yoga, swimming, chess, football, tennis,
    mountain climbing, the Olympic Games, jazz, opera, folk songs, the violin, drums, oil
    painting, photography, pottery, origami, poetry, theatre, silent films, comic books, fairy
    tales, detective stories, libraries, newspapers, radio, the printing press, handwriting,
    alphabets, sign language, dictionaries, the Roman Empire, ancient Egypt, the Silk Road, the
    Vikings, medieval castles, the Renaissance, pirates, explorers of the Arctic, the industrial
    revolution, the gold rush, museums, archaeology, maps, calendars, clocks, money, banks,
    taxes, insurance, small businesses, supermarkets, farming, irrigation, fishing, recycling,
    solar power, wind energy, electric cars, public transport, city parks, house plants,
    composting, bread, chocolate, coffee, tea, cheese, olive oil, spices, street food, breakfast,
    birthdays, weddings, harvest festivals, public holidays, school uniforms, homework,
    friendship, neighbours, volunteering, kindness, courage, patience, honesty, teamwork,
    computers, search engines, encryption, databases, robots, computer games, spreadsheets,
    email, the internet, machine learning, open-source software, video calls, 3D printing
""")

OBJECTS = _items("""
    a teapot, an umbrella, a wooden chair, a pair of boots, a compass, a lantern, a violin, a
    backpack, a kite, a typewriter, a fountain pen, a wristwatch, a mirror, a quilt, a bicycle, a
    canoe, a tent, a ladder, a hammer, a wheelbarrow, a garden hose, a refrigerator, a toaster, a
    washing machine, a vacuum cleaner, a microscope, a thermometer, a magnet, a candle, a
    doorbell, a piano, a chess set, a jigsaw puzzle, a skateboard, a sewing machine, a letterbox,
    a lift, a zip, a padlock, a parachute
""")

PLACES = _items("""
    Lisbon, Kyoto, Nairobi, Montreal, Buenos Aires, Istanbul, Hanoi, Edinburgh, Cape Town, Naples,
    Vienna, Marrakesh, Reykjavik, Lima, Melbourne, Copenhagen, Jakarta, Havana, Warsaw, Athens, a
    small fishing village, a mountain hut, a night train, a crowded market, an old library, a
    desert island, a space station, a busy kitchen, a railway station, a quiet farm, a school
    playground, a hospital, a harbour, a snowy forest
""")

TASKS = _items("""
    learn to swim, save money every month, write a cover letter, keep a diary, plan a garden,
    bake bread, fix a flat tyre, pack for a week away, give a short speech, make new friends,
    sleep better, read more books, train a puppy, clean a bicycle chain, choose a laptop, learn
    the guitar, run five kilometres, cook rice, grow tomatoes, iron a shirt, remember names,
    organise a small party, write a thank-you note, study for an exam, paint a room, remove a
    coffee stain, start a book club, prepare for a job interview, reduce food waste, sharpen a
    knife, back up my photos, choose a strong password, wrap a present, plan a weekly menu, stop
    putting things off, speak more clearly, build a bird box, sew on a button
""")

JOBS = _items("""
    a nurse, a carpenter, a pilot, a baker, a teacher, a firefighter, a judge, a gardener, a
    dentist, a journalist, a translator, an architect, a bus driver, a vet, a chef, a librarian,
    an electrician, a photographer, a farmer, a detective
""")

LANGUAGES = _items("""
    French, Spanish, German, Italian, Portuguese, Dutch, Swedish, Polish, Turkish, Japanese,
    Chinese, Arabic
""")

CODE_LANGUAGES = _items("Python, Python, Python, JavaScript, Java, C, C++, Go, Rust, Ruby")

CODE_TASKS = _items("""
    reverses a string, counts the vowels in a text, checks whether a word is a palindrome, finds
    the largest number in a list, removes duplicates from a list, sorts a list of names by
    length, computes the factorial of a number, lists the first n prime numbers, converts Celsius
    to Fahrenheit, counts how often each word occurs in a text, merges two sorted lists, checks
    whether a year is a leap year, computes the average of a list, flattens a nested list, finds
    the second smallest number, capitalises every word, checks whether two words are anagrams,
    converts a number to binary, computes the greatest common divisor of two numbers, validates
    an email address, rotates a list by k places, searches a sorted list with binary search,
    removes all spaces from a text, sums the digits of a number, finds the longest word in a
    sentence, groups words by their first letter, checks whether brackets are balanced, computes
    compound interest, splits a list into chunks of n, transposes a matrix, counts lines in a
    file, reads a CSV file and sums a column, writes a dictionary to a JSON file, generates a
    random password, computes the distance between two points, draws a triangle of stars, turns
    Roman numerals into numbers, returns the n-th Fibonacci number, finds common elements of two
    lists, swaps keys and values of a dictionary, measures how long a function takes, retries a
    function three times, finds files larger than a given size, formats a date
""")

CODE_IDEAS = _items("""
    a for loop, recursion, a hash table, a linked list, a stack, a queue, inheritance, a
    generator, exception handling, a regular expression, a unit test, a closure, type hints, a
    thread, a lambda function, version control, a REST API, list comprehension, big-O notation, a
    binary tree, a pointer, an interface
""")

CODE_TYPES = _items("""
    a bank account, a shopping cart, a library book, a playlist, a timer, a student, a parking
    garage, a to-do list, a deck of cards, a temperature sensor, a recipe, a bus route
""")

MOODS = _items("funny, sad, hopeful, mysterious, peaceful, thrilling, gentle, surprising")

READERS = _items("""
    a child, a beginner, a grandparent, a busy manager, a new student, a tourist, a friend, a
    curious teenager
""")

STYLES = _items("""
    formal, friendly, simple, cheerful, polite, dramatic, direct, lively
""")

SENTENCES = tuple(
    line.strip()
    for line in """
    The meeting has been moved to Thursday afternoon.
    Could you please tell me where the station is?
    I have lost my keys and I cannot get into the house.
    My sister is learning to play the cello.
    We would like a table for four near the window.
    The shop closes at six, but the bakery stays open.
    It rained all week, so the river is very high.
    He forgot his passport and missed the flight.
    Their new flat is small but full of light.
    Thank you for the lovely dinner last night.
    The train was late because of snow on the line.
    She has worked at the hospital for twelve years.
    Please do not feed the animals.
    Our dog is afraid of fireworks.
    I would rather walk than take the bus.
    The soup needs a little more salt.
    What time does the museum open on Sundays?
    They planted apple trees behind the barn.
    The children built a tower out of cardboard boxes.
    My phone battery is almost empty.
    You can borrow my umbrella if you bring it back.
    The exam was harder than anyone had expected.
    There is a parcel for you at the post office.
    The old bridge will be closed until spring.
    """.strip().splitlines()
)

CLUMSY = tuple(
    line.strip()
    for line in """
    me and him goes to the market every saterday for buy vegetables
    the report are late becuase nobody have send me the numbers
    i am writing to you for ask if the room is still aviable in june
    she dont like when peoples is talking loud in the train
    yesterday we was walking in the park and seen a very big dogs
    the machine it make a strange noise since two weeks ago
    can you explain me how works the new printer please
    there is many reason why i wants to change my job
    he said that he will came but he never arrive
    the informations in the letter was not correctly
    my friend which lives in the city she have a small cat
    if i would have more time i will learn cooking good
    """.strip().splitlines()
)

# First stage: what the passage of a second prompt is taken from.
PASSAGES = (
    "Write a short passage about {topic}.",
    "Write one paragraph about {topic} for a school book.",
    "Write a short news report about {topic} in {place}.",
    "Write a short letter from {job} about {topic}.",
    "Write five or six sentences about {object} and the person who owns it.",
    "Write a short story set in {place}. Give the people names.",
    "Describe a day in the life of {job} in one paragraph.",
    "Write a short encyclopedia entry on {topic} with a few dates and numbers.",
    "Write a short product description of {object}.",
    "Write a short email from {job} to a colleague about {topic}.",
)

TEMPLATES: dict[str, tuple[str, ...]] = {
    "chat": (
        "What should I know about {topic}?",
        "How do I {task}?",
        "Explain {topic} to {reader}.",
        "What is the difference between {topic} and {topic2}?",
        "I want to {task}. Where should I start?",
        "Why are people interested in {topic}?",
        "Can you help me {task}? I only have {small} hours.",
        "What does {job} do all day?",
        "Tell me something surprising about {topic}.",
        "What would you pack for {small} days in {place}?",
        "How was {object} invented?",
        "Is it hard to {task}? Be honest.",
        "What are common mistakes when people try to {task}?",
        "My friend wants to become {job}. What advice would you give?",
        "Compare {object} with {object2}: what is each good for?",
        "What questions could I ask {job} about {topic}?",
    ),
    "writing": (
        "Write a {mood} story about {job} and {object}.",
        "Write a poem about {topic}.",
        "Write a short dialogue between {job} and {job2} about {topic}.",
        "Write an email to {job} asking about {topic}.",
        "Write the opening of a novel set in {place}.",
        "Write a {mood} diary entry of someone in {place}.",
        "Write an advertisement for {object}.",
        "Write a short speech about {topic} for {reader}.",
        "Describe {place} in the early morning.",
        "Write a postcard from {place}.",
        "Write a story of {small} sentences about {object}.",
    ),
    "code": (
        "Write a {code} function that {does}.",
        "Write a {code} program that {does}, with comments.",
        "Show me how to write a function in {code} that {does} and how to test it.",
        "What is {idea} in {code}? Give an example.",
        "Write a {code} class for {thing}.",
        "Explain {idea} with a short {code} example.",
        "I need a {code} function that {does}. Please explain it line by line.",
        "Write a {code} function that {does}, and another one that {does2}.",
        "How would you model {thing} in {code}?",
        "Write three test cases for a {code} function that {does}.",
        "What can go wrong in a {code} function that {does}?",
        "Give me two ways to write a {code} function that {does}.",
    ),
    "maths": (
        "What is {mid} times {small}?",
        "Compute {big} + {big2} - {mid} step by step.",
        "A shop sells {object} for {mid} dollars. What do {small} of them cost with a discount "
        "of {percent}%?",
        "What is {percent}% of {big}?",
        "A train travels {big} km in {small} hours. What is its average speed?",
        "Solve for x: {small}x + {mid} = {big}.",
        "{job} earns {big} dollars a week and spends {mid}. How much is saved in {small} weeks?",
        "A rectangle is {mid} cm long and {small} cm wide. What are its area and perimeter?",
        "Find the average of {mid}, {mid2}, {small} and {big}.",
        "How many minutes are there in {small} hours and {mid} minutes?",
        "Is {big} divisible by {small}? Show how you know.",
        "I bought {small} apples and {small2} pears and gave {small3} pieces of fruit away. How "
        "many pieces do I have left?",
        "Write {big} in words, then in Roman numerals.",
        "List the first {small} multiples of {mid}.",
    ),
    "list": (
        "List {small} facts about {topic}.",
        "Give me {small} ideas for a school project on {topic}.",
        "List {small} things you would find in {place}.",
        "Name {small} reasons to {task}.",
        "Make a checklist for someone who wants to {task}.",
        "Give me {small} titles for an article about {topic}.",
        "Make a table of {small} kinds of things to do with {topic}, with a short description "
        "of each.",
        "List the steps to {task}, one per line.",
        "Give me {small} synonyms of the word '{mood}' and a sentence with each.",
        "Write {small} quiz questions about {topic} with their answers.",
        "List the pros and cons of {topic}.",
    ),
    "summarise": (
        "Summarise this text in two sentences.\n\n{passage}",
        "{passage}\n\nSummarise the above in one sentence.",
        "What is the main point of this passage?\n\n{passage}",
        "Give me the key points of the following text as a list.\n\n{passage}",
        "Shorten this to half its length:\n\n{passage}",
        "Write a headline and a one-line summary for this text.\n\n{passage}",
        "Explain this passage to {reader} in a few words.\n\n{passage}",
    ),
    "rewrite": (
        "Rewrite this text in a {style} style.\n\n{passage}",
        "Correct the grammar and spelling: {clumsy}",
        "Rewrite this in the past tense.\n\n{passage}",
        "Turn this text into a numbered list of facts.\n\n{passage}",
        "Rewrite the passage so that {reader} can understand it.\n\n{passage}",
        "Make this sentence more {style}: {sentence}",
        "Rewrite the following as a dialogue between two people.\n\n{passage}",
        "Say this in {small} different ways: {sentence}",
        "Fix the mistakes in this sentence and explain them: {clumsy}",
        "Repeat the text below, but replace every name with another one.\n\n{passage}",
    ),
    "translate": (
        "Translate into {language}: {sentence}",
        "How do you say '{sentence}' in {language}?",
        "Translate this passage into {language}.\n\n{passage}",
        "Translate these two sentences into {language} and {language2}.\n\n{sentence} {sentence2}",
        "Write {small} useful phrases in {language} for a visit to {place}, with translations.",
        "Translate the first sentence of this text into {language} and {language2}.\n\n{passage}",
    ),
    "extract": (
        "List all names of people and places in this text.\n\n{passage}",
        "Extract the nouns from this sentence: {sentence}",
        "Which numbers and dates are in the text below?\n\n{passage}",
        "Pick the three most important words of this passage and explain why.\n\n{passage}",
        "Extract the facts of this text as JSON with the keys 'who', 'what', 'where' and 'when'."
        "\n\n{passage}",
        "Copy out the first and the last sentence of this text.\n\n{passage}",
        "Find all adjectives in the following text.\n\n{passage}",
        "Is the tone of this text positive, negative or neutral? Quote the words that show it."
        "\n\n{passage}",
    ),
    "long": (
        "Write a long and detailed essay about {topic}, with headings.",
        "Write a {mood} short story in several chapters about {job} in {place}.",
        "Write a complete tutorial for someone who wants to {task}.",
        "Explain {topic} in depth, from the basics to open questions.",
        "Write a detailed plan for {small} weeks of learning about {topic}.",
        "Write a long dialogue between {job} and {job2} about {topic}.",
        "Write a travel guide to {place} with a section for each of {small} days.",
        "Write a {code} program that {does}, then explain every part of it and show its tests.",
        "Implement {thing} in {code} with all methods one would expect, and document each of them.",
        "Compare {topic}, {topic2} and {topic3} in a long article.",
        "Read this text, then write a long continuation of it.\n\n{passage}",
        "Write a detailed report on this text: its facts, its tone, its gaps.\n\n{passage}",
    ),
    "passage": (
        "{passage}\n\nWho or what is this text about?",
        "Read the text and answer: why does it matter?\n\n{passage}",
        "Ask and answer {few} questions about this passage.\n\n{passage}",
        "Use only the text below to say what is known about its subject.\n\n{passage}",
        "{passage}\n\nWhat is likely to happen next?",
        "{passage}\n\nIs anything in this text hard to believe? Explain.",
        "Here is a text:\n\n{passage}\n\nWhat would {job} say about it?",
    ),
}

LONG = "long"
"""The kind of prompts whose answers may have `Mix.max_long_tokens` tokens."""

# What may stand after a prompt that does not end with a text.
MANNERS = (
    "Keep it short.",
    "Use at most {mid} words.",
    "Answer in {few} sentences.",
    "Use simple words.",
    "Be precise.",
    "Give an example.",
    "Please explain your choice.",
    "Write it for {reader}.",
    "Keep the tone {style}.",
    "Answer like {job} would.",
    "No introduction, please.",
    "Start with the most important point.",
    "Use short sentences.",
    "End with a question.",
    "Think about it step by step.",
    "Mention {place}.",
    "Use headings.",
    "Write at least {mid} words.",
)
_WITH_MANNER = {"chat": 0.4, "writing": 0.5, "code": 0.2, "list": 0.4}

WEIGHTS = {
    "chat": 5,
    "writing": 3,
    "code": 5,
    "maths": 3,
    "list": 4,
    "summarise": 3,
    "rewrite": 3,
    "translate": 2,
    "extract": 2,
    "long": 3,
    "passage": 2,
}

FOLLOW_UPS: dict[str, tuple[str, ...]] = {
    "": (
        "Can you make that shorter?",
        "Tell me more about the first point.",
        "Can you say that in simpler words?",
        "Why is that?",
        "Give me an example.",
        "Now put it as a list.",
        "What is the most important part of your answer?",
        "Thanks! Is there anything I should be careful about?",
        "And what about {topic}?",
        "Can you explain it to {reader}?",
        "Write it again in a {style} tone.",
        "Summarise your answer in one sentence.",
        "Are you sure? Please check it again.",
        "Translate your answer into {language}.",
        "Give me {few} more.",
        "How would {job} answer that?",
        "What should I read next?",
    ),
    "writing": (
        "Make it more {mood}.",
        "Write what happens next.",
        "Give it a title.",
        "Now tell it from another point of view.",
        "Add a line about {object}.",
        "Make the ending {mood}.",
        "Set it in {place} instead.",
    ),
    "code": (
        "Add error handling.",
        "Now write it in {code}.",
        "How can I test this?",
        "Can you make it faster?",
        "Add comments and type hints.",
        "What is its complexity?",
        "Rename the variables so that they are clearer.",
        "Show me how to call it.",
        "Change it so that it also {does}.",
    ),
    "maths": (
        "Show each step.",
        "What if the first number were {mid} instead?",
        "Check the result.",
        "Now double the answer.",
        "Explain it to {reader}.",
        "Is there an easier way?",
    ),
}
"""What a user may say next, by kind of the first prompt; "" fits every kind."""

_SLOTS: dict[str, tuple[str, ...]] = {
    "topic": TOPICS,
    "object": OBJECTS,
    "place": PLACES,
    "task": TASKS,
    "job": JOBS,
    "language": LANGUAGES,
    "code": CODE_LANGUAGES,
    "does": CODE_TASKS,
    "idea": CODE_IDEAS,
    "thing": CODE_TYPES,
    "mood": MOODS,
    "reader": READERS,
    "style": STYLES,
    "sentence": SENTENCES,
    "clumsy": CLUMSY,
}
_NUMBERS: dict[str, Callable[[Random], int]] = {
    "few": lambda rng: rng.randint(2, 4),
    "small": lambda rng: rng.randint(3, 12),
    "mid": lambda rng: rng.randint(13, 99),
    "big": lambda rng: rng.randint(100, 999),
    "percent": lambda rng: 5 * rng.randint(1, 12),
}
_SLOT = re.compile(r"\{([a-z]+)(\d?)\}")


@dataclass(frozen=True)
class Seed:
    """A prompt to be. With `passage_prompt`, `prompt` still holds PASSAGE, to be replaced by the
    target's answer to it."""

    kind: str
    prompt: str
    passage_prompt: str | None = None


def draw_seed(rng: Random) -> Seed:
    """A prompt from a random template."""
    (kind,) = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
    template = rng.choice(TEMPLATES[kind])
    if rng.random() < _WITH_MANNER.get(kind, 0.0):
        template = f"{template} {rng.choice(MANNERS)}"
    prompt = _fill(template, rng)
    if PASSAGE not in prompt:
        return Seed(kind, prompt)
    return Seed(kind, prompt, _fill(rng.choice(PASSAGES), rng))


def draw_follow_up(rng: Random, kind: str) -> str:
    """What the user says after the first answer: half of the time something that fits the kind
    alone, where there is such."""
    own = FOLLOW_UPS.get(kind, ())
    return _fill(rng.choice(own if own and rng.random() < 0.5 else FOLLOW_UPS[""]), rng)


def _fill(template: str, rng: Random) -> str:
    """The template with its slots filled, each with a value of its own, and a capital first."""
    taken: dict[str, list[str]] = {}

    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        if match.group(0) == PASSAGE:
            return PASSAGE
        used = taken.setdefault(name, [])
        while True:
            drawn = str(_NUMBERS[name](rng)) if name in _NUMBERS else rng.choice(_SLOTS[name])
            if drawn not in used:
                used.append(drawn)
                return drawn

    text = _SLOT.sub(value, template)
    return text if text.startswith(PASSAGE) else text[:1].upper() + text[1:]
