"""A reward in a separate file: the processes that compute it import nothing heavy."""


def even_share(prompt: str, completions: str, prompt_ids: list, completion_ids: list, **row: object) -> float:
    """Return the share of even token ids: about half for a random model, with a spread."""
    return sum(token % 2 == 0 for token in completion_ids) / len(completion_ids)
