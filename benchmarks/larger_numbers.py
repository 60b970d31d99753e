"""One task for every method: name the larger of two numbers.

Pairs of held-out questions never occur in training. A row serves every method: `messages` is the
question, `answer` is right, `chosen` and `rejected` are the two numbers.
"""

import random
from typing import Any

Row = dict[str, Any]

NUM_TRAINING, NUM_HELD_OUT = 1024, 128


def larger_number_rows(seed: int = 0) -> tuple[list[Row], list[Row]]:
    """Return (training rows, held-out rows), the same for the same seed on every machine."""
    numbers = random.Random(seed)
    pairs = [(large, small) for large in range(10, 100) for small in range(10, large)]
    rows = [
        question(numbers, large, small) for large, small in numbers.sample(pairs, NUM_TRAINING + NUM_HELD_OUT)
    ]
    return rows[:NUM_TRAINING], rows[NUM_TRAINING:]


def question(numbers: random.Random, large: int, small: int) -> Row:
    """Return a question with the two numbers in random order."""
    first, second = numbers.sample([large, small], 2)
    return {
        "messages": [{"role": "user", "content": f"{first} {second}"}],
        "answer": str(large),
        "chosen": str(large),
        "rejected": str(small),
    }
