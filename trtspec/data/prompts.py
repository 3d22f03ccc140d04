"""Built-in prompts for `trtspec bench` and `trtspec demo`, in two categories.

How much speculation gains depends on the text, so the two ends are kept apart: answers that copy
from the prompt (where looking up n-grams finds long drafts) and answers that do not.
"""

from __future__ import annotations

REPEATS: tuple[str, ...] = (
    # copy editing: most of the answer is the prompt
    "Correct the spelling mistakes in this text and write the whole text again:\n\n"
    "The harbour town of Lindvik wakes before the sun. Fishing boats leave the harbour at four, "
    "and by six the baker on Rope Street has sold his first hundred rolls. The ferry to the "
    "outer islands leaves the harbour at seven, wether permitting, and comes back at noon with "
    "mail, milk and the occassional goat. In the evening the fishing boats return to the "
    "harbour, and the gulls of Lindvik folow them home.",
    # a code edit
    "Rename the variable `total` to `balance` in this Python code. Reply with the complete code "
    "and nothing else.\n\n"
    "```python\n"
    "class Account:\n"
    "    def __init__(self, owner, total=0):\n"
    "        self.owner = owner\n"
    "        self.total = total\n\n"
    "    def deposit(self, amount):\n"
    '        """Add the amount to the total."""\n'
    "        self.total = self.total + amount\n"
    "        return self.total\n\n"
    "    def withdraw(self, amount):\n"
    '        """Take the amount from the total."""\n'
    "        if amount > self.total:\n"
    '            raise ValueError("not enough money in the account")\n'
    "        self.total = self.total - amount\n"
    "        return self.total\n"
    "```",
    # a summary that keeps names and phrases
    "Summarise this report in three sentences, using its own words where you can.\n\n"
    "The city council of Marrow Bridge met on Tuesday to discuss the new cycle path along the "
    "River Tamble. The cycle path along the River Tamble would be four kilometres long and join "
    "the railway station with the university. Councillor Ines Okafor said that the cycle path "
    "would take two hundred cars a day off Mill Road. Councillor Peter Vane said that the cost, "
    "estimated at three million euros, was too high for a city of forty thousand people. The "
    "city council of Marrow Bridge will vote on the cycle path in March.",
    # a rewrite of a list
    "Write this shopping list again with every item in the same words, as a numbered list, one "
    "item on each line:\n\n"
    "two litres of fresh milk; one loaf of dark rye bread; six large brown eggs; half a kilo of "
    "ripe red tomatoes; one jar of smooth peanut butter; three packets of dried pasta; a bottle "
    "of cold-pressed olive oil; four green apples; a small bag of ground coffee; one bar of dark "
    "chocolate with sea salt",
)

OPEN: tuple[str, ...] = (
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Explain to a ten-year-old why the sky is blue during the day and red at sunset.",
    "Give me ideas for a rainy weekend with two children and no car.",
    "What should I think about before I move to a country whose language I do not speak?",
)

PROMPT_SETS: dict[str, tuple[str, ...]] = {"repeats": REPEATS, "open": OPEN}

# What the demo shows: two answers that copy, one that does not.
DEMO_PROMPTS: tuple[str, ...] = (REPEATS[0], REPEATS[1], OPEN[0])
