"""Sampling options of a record of another trainer: as given, else as in its config, else assumed.

Trainers name the same options in their own ways: `temperature` (TRL), `rollout_temperature`
(slime), `actor_rollout_ref.rollout.temperature` (verl), `policy.generation.temperature` (NeMo-RL).
So an option is found by its last word, where all places but those of validation agree.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from consistency.source import Sampling

ASSUMED = {"temperature": 1.0, "top_p": 1.0, "top_k": None}
ENGINE_DTYPE = "bfloat16"  # the default of engines
OF_VALIDATION = ("val", "eval")


def sampling_of(
    config: Mapping[str, Any], given: Mapping[str, Any], dtype: str
) -> tuple[Sampling, tuple[str, ...]]:
    """Return the sampling options, and one sentence for each that was not given.

    Args:
        config: the trainer's own options, {} if unknown.
        given: options that the user gave.
        dtype: of the trainer.
    """
    values, notes = dict(given), []
    for name, usual in ASSUMED.items():
        if name in given:
            continue
        found = dict(numbers_named(config, name))
        if len(set(found.values())) == 1:
            place, values[name] = next(iter(found.items()))
            notes.append(f"{name} {values[name]:g}, as {place} in the trainer's config")
        else:
            values[name] = usual
            notes.append(f"{name} is not known: {'no limit' if usual is None else f'{usual:g}'} was assumed")
    notes.append(f"the engine's precision is not known: {ENGINE_DTYPE} was assumed")
    top_k = values["top_k"]
    sampling = Sampling(
        temperature=values["temperature"],
        top_p=values["top_p"],
        top_k=int(top_k) if top_k is not None and top_k > 0 else None,  # 0 and -1: no limit
        greedy=values["temperature"] == 0.0,
        trainer_dtype=dtype,
        engine_dtype=ENGINE_DTYPE,
    )
    return sampling, tuple(notes)


def numbers_named(options: Any, name: str, path: tuple[str, ...] = ()) -> Iterator[tuple[str, float]]:
    if isinstance(options, Mapping):
        for key, value in options.items():
            if not str(key).startswith(OF_VALIDATION):
                yield from numbers_named(value, name, (*path, str(key)))
    elif path and path[-1] in (name, f"rollout_{name}") and type(options) in (int, float):
        yield ".".join(path), float(options)
