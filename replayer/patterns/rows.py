"""Recognise how the rows that two recordings of a step trained on differ, by their names."""

from recorder import RecordedStep
from replayer.patterns.pattern import Pattern, count
from replayer.stages import Foreign, find_rows, match_rows

MIN_PROMPTS = 2  # of a shift


def pattern_of_rows(left: RecordedStep, right: RecordedStep, foreign: Foreign) -> Pattern | None:
    """Recognise rows that only one side has: other prompts, or fewer."""
    if any(foreign):
        rows, other_rows = match_rows(left, right)
    else:
        rows, other_rows = find_rows(left), find_rows(right)
        if shift := shift_of_prompts(set(rows), set(other_rows)):
            return Pattern(
                "shifted",
                f"B has prompts {range_of(set(other_rows))} where A has {range_of(set(rows))}: "
                f"{count(abs(shift), 'prompt')} {'later' if shift > 0 else 'earlier'}",
                float(shift),
            )
    only = [len(set(rows) - set(other_rows)), len(set(other_rows) - set(rows))]
    if all(only):
        return Pattern(
            "replaced", f"{only[0]} of {len(rows)} rows of A are not in B, {only[1]} of B's not in A"
        )
    side, other = ("A", "B") if only[0] else ("B", "A")
    kind = "one row" if sum(only) == 1 else "other support"
    return Pattern(
        kind, f"{side} has {count(sum(only), 'row')} that {other} lacks, and all of its", float(sum(only))
    )


def shift_of_prompts(left: set[tuple[int, int]], right: set[tuple[int, int]]) -> int | None:
    """Return by how much all prompt ids of B exceed those of A, None if by different numbers."""
    prompts = {prompt for prompt, _ in left}
    if len(prompts) < MIN_PROMPTS or not right:
        return None
    shift = min(right)[0] - min(left)[0]
    return shift if shift and {(prompt + shift, sample) for prompt, sample in left} == right else None


def range_of(rows: set[tuple[int, int]]) -> str:
    """Return `4 to 7`: the lowest and highest prompt id."""
    return f"{min(rows)[0]} to {max(rows)[0]}"


def pattern_of_order(left: RecordedStep, right: RecordedStep) -> Pattern:
    """Describe the order of the same rows."""
    rows, other_rows = find_rows(left), find_rows(right)
    names, others = list(rows), list(other_rows)
    moved = sum(name != other for name, other in zip(names, others, strict=True))
    ranks = sum(rows[name].rank != other_rows[name].rank for name in names)
    how = "reversed" if names == others[::-1] else f"{moved} of them at another place"
    on_ranks = f", {ranks} on another rank" if ranks else ""
    return Pattern(
        "same set, other order", f"the same {count(len(names), 'row')}, {how}{on_ranks}", float(moved)
    )
