"""Which quantity the name of a metric means: by the names of frameworks, else by its last words.

The rows of `quantities.toml` hold both. A name is cut into segments at `/`, and segments into
words; words for a mean are left out. The longest ending that is known names the quantity:
`my_env/ppo/kl_loss/mean` ends with `kl loss`, and not with `loss`. Other orders count where no
further word remains: `loss/policy`. Words before the ending may not change what it means (`critic`,
`max`), and in the last segment only words that add nothing are allowed: `draft_grad_norm` is none
of the policy's.
"""

import re
import tomllib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

QUANTITIES: dict[str, dict[str, Any]] = tomllib.loads(
    (Path(__file__).parent / "quantities.toml").read_text(encoding="utf-8")
)
TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
FAMILIES: dict[str, str] = TEXTS["families"]
MEANS, EVALUATION, NEUTRAL, FORBIDDEN, NO_MEAN = (
    frozenset(TEXTS["words"][name]) for name in ("means", "evaluation", "neutral", "forbidden", "no_mean")
)
SLIME = ("rollout/raw_reward", "train_rollout_logprob_abs_diff")
NOT_A_DATASET = ("*ratio*", "*_len*", "*-pass*", "*step", "*/*/*")


def choose_names(names: Sequence[str]) -> dict[str, str]:
    """Return the name under which a run logs each quantity, of those that it logs."""
    exact = {quantity: find_name(quantity, names) for quantity in QUANTITIES}
    chosen = {quantity: name for quantity, name in exact.items() if name is not None}
    if "eval_reward" not in chosen and any(name in names for name in SLIME):
        # slime and miles log the reward of a data set under its own name
        sets = [name for name in names if fnmatch(name, "eval/*") and not matches(name, NOT_A_DATASET)]
        chosen |= dict(zip(("eval_reward",), sets, strict=False))
    free = [name for name in names if name not in chosen.values()]
    return by_words(free) | chosen


@cache
def is_validation(name: str) -> bool:
    """Return whether a name alone means the reward on a validation set."""
    return "eval_reward" in choose_names([name])


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def find_name(quantity: str, names: Sequence[str]) -> str | None:
    """Return the first of a run's names that a framework logs a quantity under, or None.

    `KL beside DeltaLossPi` is `KL` in a run that logs `DeltaLossPi` as well.
    """
    rows = (row.split(" beside ") for row in QUANTITIES[quantity]["names"])
    pairs = ((name, pattern) for pattern, *beside in rows if {*beside} <= {*names} for name in names)
    return next((name for name, pattern in pairs if fnmatch(name, pattern)), None)


def family_of(names: Sequence[str]) -> str:
    """Return the framework whose names these are, or "unknown"."""
    for pattern, family in FAMILIES.items():
        if any(fnmatch(name, pattern + "*") for name in names):
            return family
    return "unknown"


@cache
def endings_by_quantity(is_evaluation: bool) -> dict[str, list[str]]:
    column = "evaluated" if is_evaluation else "endings"
    return {quantity: row[column] for quantity, row in QUANTITIES.items() if column in row}


def by_words(names: Iterable[str]) -> dict[str, str]:
    """Return for each quantity the name that means it, of the names that mean any."""
    best: dict[str, tuple[tuple[int, int], str]] = {}
    for name in names:
        found = read_name(name)
        if found is not None:
            quantity, rank = found
            best[quantity] = min(best.get(quantity, (rank, name)), (rank, name), key=lambda one: one[0])
    return {quantity: name for quantity, (_, name) in best.items()}


def read_name(name: str) -> tuple[str, tuple[int, int]] | None:
    """Return the quantity that a name means, and how well it does (the lowest is best)."""
    segments = [kept for segment in re.split(r"[/|:]|\.(?=\S)", name) if (kept := words_of(segment))]
    found_words = [word for segment in segments for word in segment]
    is_evaluation = not EVALUATION.isdisjoint(found_words)
    found = [
        (len(ending.split()), ends_with(found_words, ending), quantity, rank)
        for quantity, endings in endings_by_quantity(is_evaluation).items()
        for rank, ending in enumerate(endings)
        if ends_with(found_words, ending)
        or (set(ending.split()) <= set(found_words) <= NEUTRAL | EVALUATION | set(ending.split()))
    ]
    if not found:
        return None
    size, is_end, quantity, rank = max(found)
    before = found_words[:-size] if is_end else []
    in_leaf = segments[-1][:-size]
    row = QUANTITIES[quantity]
    needed = set(row.get("needed", ()))
    forbidden = (FORBIDDEN | set(row.get("forbidden", ()))) - set(row.get("allowed", ()))
    if not forbidden.isdisjoint(before) or (needed and needed.isdisjoint(found_words)):
        return None
    if is_end and not is_evaluation and not (NEUTRAL | needed).issuperset(in_leaf):
        return None
    return quantity, (rank, len(found_words) - size)


def nearest_quantity(name: str) -> str:
    """Return the quantity whose words a name has beside others, the longest; "" without one.

    A guess, to be offered and not to be judged by: `my_critic_loss` is perhaps a value loss.
    """
    found = {word for segment in re.split(r"[/|:]", name) for word in words_of(segment)}
    is_evaluation = not EVALUATION.isdisjoint(found)
    if not is_evaluation and not found.isdisjoint(NO_MEAN):
        return ""
    fitting = [
        (len(ending.split()), quantity)
        for quantity, endings in endings_by_quantity(is_evaluation).items()
        for ending in endings
        if found.issuperset(ending.split())
    ]
    return max(fitting, default=(0, ""), key=lambda one: one[0])[1]


def ends_with(found: Sequence[str], ending: str) -> bool:
    """Return whether the last words are those of an ending, in order."""
    return list(found[-len(ending.split()) :]) == ending.split()


def words_of(segment: str) -> list[str]:
    """Return the words of a segment in small letters, without those for a mean, and `@8`."""
    spaced = re.sub(
        r"([a-z0-9])([A-Z])", r"\1 \2", segment.partition("@")[0] if "mean@" in segment else segment
    )
    return [word for word in re.findall(r"[a-z0-9]+", spaced.lower()) if word not in MEANS]
