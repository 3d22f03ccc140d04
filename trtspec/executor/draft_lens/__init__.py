"""How many drafts a step makes: fixed, by a schedule, or chosen by what steps cost and bring."""
