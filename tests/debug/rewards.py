"""Rewards in a separate file: the processes that compute them import nothing heavy."""


def even_share(prompt: str, completions: str, prompt_ids: list, completion_ids: list, **row: object) -> float:
    """Return the share of even token ids: about half for a random model, with a spread."""
    return sum(token % 2 == 0 for token in completion_ids) / len(completion_ids)


def odd_tokens(prompt: str, completions: str, prompt_ids: list, completion_ids: list, **row: object) -> float:
    return float(sum(token % 2 for token in completion_ids))


def first_token(
    prompt: str, completions: str, prompt_ids: list, completion_ids: list, **row: object
) -> float:
    """Return a number that the first token determines; the row has its picture."""
    assert isinstance(row["images"][0], bytes)
    return float(completion_ids[0] % 7)
