"""A reward with two parts: the sum is right, and the working is shown."""

import re


def reward(prompt, completion, answer, metadata):
    """Being right counts five times as much as writing out running totals.

    The parts are added up; a part called `reward` would be taken as the whole instead.
    """
    numbers = re.findall(r"\d+", completion)
    return {
        "right": float(bool(numbers) and numbers[-1] == answer),
        "worked": 0.2 * ("," in completion),
    }
