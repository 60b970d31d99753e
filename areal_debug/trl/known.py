"""The methods of TRL's trainers that the adapter replaces on one instance, and how it checks them.

TRL has no public hook for tokens, so these are private methods. Their parameters are compared with
those of the version that was read; a version in which they differ is refused before training.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

READ = "1.16"  # the version of TRL whose source these are from
LOSS = {
    "compute_loss": ("model", "inputs", "return_outputs", "num_items_in_batch"),
    "_get_grad_norm": ("model", "grad_norm"),
}
GENERATION = {
    "_generate": ("prompts",),
    "_tokenize_prompts": ("prompts",),
    "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
    "_generate_and_score_completions": ("inputs",),
}
METHODS = {"GRPOTrainer": LOSS | GENERATION, "SFTTrainer": LOSS, "DPOTrainer": LOSS}
GENERATED = 8  # values that `_generate` returns


class UnknownTrainer(ValueError):
    """The trainer is none that the adapter knows, or of another version of TRL."""


def known_name(trainer: Any) -> str:
    """Return which of TRL's trainers this is, or is derived from. Raises UnknownTrainer."""
    names = [cls.__name__ for cls in type(trainer).__mro__]
    found = next((name for name in names if name in METHODS), None)
    if found is None:
        raise UnknownTrainer(
            f"a {names[0]} is not a trainer that areal_debug.trl knows ({', '.join(METHODS)}): "
            "use areal_debug.Recorder in its loop"
        )
    for method, expected in METHODS[found].items():
        function = getattr(type(trainer), method, None)
        has = "no such method" if function is None else parameters_of(function)
        if has != expected:
            raise unknown_version(f"{names[0]}.{method} has {has}, {expected} expected")
    return found


def parameters_of(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)[1:]


def unknown_version(what: str) -> UnknownTrainer:
    """Return the error for a version of TRL in which something is not as expected."""
    return UnknownTrainer(
        f"TRL {version('trl')} is not known to areal_debug.trl, which was written for TRL {READ}: {what}; "
        "use areal_debug.Recorder in the loop, or that version"
    )


@contextmanager
def replaced(trainer: Any, methods: dict[str, Any]) -> Iterator[None]:
    """Replace methods and attributes of this instance until the end of the block."""
    before = {name: vars(trainer)[name] for name in methods if name in vars(trainer)}
    vars(trainer).update(methods)
    try:
        yield
    finally:
        for name in methods:
            del vars(trainer)[name]
        vars(trainer).update(before)
