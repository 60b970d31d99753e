"""A reward of any completion. Its own file, so that the process that computes it imports little."""


def even_share(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **row: object
) -> float:
    """Return the share of even token ids: it differs between samples, with any model."""
    return sum(token % 2 == 0 for token in completion_ids) / max(1, len(completion_ids))
