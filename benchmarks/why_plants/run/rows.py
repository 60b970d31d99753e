"""A module of the user's: the rows to train on."""


def prepare(rows: list[dict]) -> list[dict]:
    return list(rows)
