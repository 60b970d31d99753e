"""A reward in a file of its own: the processes that compute it import nothing heavy."""


def even_share(prompt: str, completions: str, prompt_ids: list, completion_ids: list, **row: object) -> float:
    """The share of even token ids: a random model gets about half, with a spread."""
    return sum(token % 2 == 0 for token in completion_ids) / len(completion_ids)
