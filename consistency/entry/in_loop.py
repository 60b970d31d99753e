"""Compare engine logprobs with the proximal ones of the same step during training.

It costs no further forward pass. Tokens are grouped by version lag. Those of the trainer's own
version must agree whatever the policy does; a difference that appears later means that the engine
does not hold the weights that it was sent.
"""

import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from areal_core.algorithm.alignment import to_next_token
from areal_core.safety.durable import append_lines
from consistency.causes import Finding, finding
from consistency.measure import Noise, k3
from consistency.source import published_noise
from consistency.tokens import Floats, Ints

logger = logging.getLogger(__name__)

JUMP = 3.0
LN2 = math.log(2.0)


@dataclass(frozen=True)
class Sums:
    """Number of tokens, sums of |D|, k3 and |D| > ln 2; none includes `not_finite` tokens."""

    num_tokens: int = 0
    absolute: float = 0.0
    k3: float = 0.0
    beyond_ln2: int = 0
    not_finite: int = 0

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    @property
    def mean_abs(self) -> float:
        """Mean |D|; NaN without tokens."""
        return self.absolute / self.num_tokens if self.num_tokens else math.nan


@dataclass(frozen=True)
class Reading:
    """One step. Keys of `by_lag` are trainer version minus version of the weights that sampled."""

    step: int
    version: int
    by_lag: dict[int, Sums]

    @property
    def all(self) -> Sums:
        """Sums over all tokens."""
        return sum(self.by_lag.values(), Sums())

    @property
    def freshest(self) -> Sums:
        return self.by_lag[min(self.by_lag)]


def read_step(batch: dict[str, Tensor], proximal: Tensor, version: int) -> dict[int, Sums]:
    """Sum by lag.

    `batch` is that of the event (ARCHITECTURE.md); `proximal`, float [B, T], is next-token aligned.
    """
    sampled = to_next_token(batch)
    kept = sampled["loss_mask"].bool()
    engine, trainer = (values[kept].double().cpu().numpy() for values in (sampled["logprobs"], proximal))
    lag = version - sampled["versions"][kept].cpu().numpy().astype(np.int64)
    return sums_by_lag(lag, trainer - engine)


def sums_by_lag(lag: Ints, difference: Floats) -> dict[int, Sums]:
    found = {}
    for value in np.unique(lag):
        group = difference[lag == value]
        finite = group[np.isfinite(group)]
        found[int(value)] = Sums(
            num_tokens=len(finite),
            absolute=float(np.abs(finite).sum()),
            k3=float(k3(finite).sum()),
            beyond_ln2=int((np.abs(finite) > LN2).sum()),
            not_finite=len(group) - len(finite),
        )
    return found


def join(ranks: Sequence[dict[int, Sums]]) -> dict[int, Sums]:
    """Add the sums of all ranks."""
    lags = sorted({lag for sums in ranks for lag in sums})
    return {lag: sum((sums[lag] for sums in ranks if lag in sums), Sums()) for lag in lags}


def suspicion_of(reading: Reading, healthy: Sequence[float], noise: Noise) -> Finding | None:
    """Return the suspected cause of a step's difference, or None if it is within the noise floor.

    `healthy` holds mean |D| of the freshest tokens in earlier healthy steps.
    """
    now = reading.freshest.mean_abs
    if reading.all.not_finite:
        return finding("R60.loop", count=reading.all.not_finite, step=reading.step)
    if not now > noise.mean_abs:
        return None
    usual = float(np.median(healthy)) if healthy else math.inf
    key = "R24.loop" if now > JUMP * usual else "R01.loop"
    lag, checks = min(reading.by_lag), len(healthy)
    return finding(key, now=now, lag=lag, limit=noise.mean_abs, usual=usual, checks=checks)


@dataclass
class InLoop:
    """An observer of a run that computes proximal logprobs.

    It compares every `every`-th step; rank 0 appends the numbers to `file` (JSON lines) and logs
    warnings. `gather`, a collective, collects the sums of all ranks.
    """

    every: int
    file: Path
    gather: Callable[[dict[int, Sums]], list[dict[int, Sums]]]
    rank: int = 0
    _noise: Noise | None = None
    _version: int = 0
    _batch: dict[str, Tensor] = field(default_factory=dict)
    _healthy: list[float] = field(default_factory=list)

    def __call__(self, event: str, **facts: Any) -> None:
        if event == "start":
            self._noise = noise_of_run(facts["config"])
        elif event == "batch":
            self._version, self._batch = facts["version"], facts["batch"]
        elif event == "advantages" and facts["step"] % self.every == 0:
            self._check(facts["step"], facts["inputs"]["prox_logp"])

    def _check(self, step: int, proximal: Tensor) -> None:
        local = read_step(self._batch, proximal, self._version)
        reading = Reading(step, self._version, join(self.gather(local)))
        if self.rank != 0 or not reading.by_lag:
            return
        assert self._noise is not None, "the loop emits the event `start` first"
        suspicion = suspicion_of(reading, self._healthy, self._noise)
        self._write(reading, suspicion)
        if suspicion is None:
            self._healthy.append(reading.freshest.mean_abs)
            return
        logger.warning(
            "step %d: %s (%s): %s. %s", step, suspicion.name, suspicion.id, suspicion.evidence, suspicion.fix
        )

    def _write(self, reading: Reading, suspicion: Finding | None) -> None:
        total = reading.all
        facts = {
            "step": reading.step,
            "version": reading.version,
            "num_tokens": total.num_tokens,
            "mean_abs": total.mean_abs,
            "k3": total.k3 / max(total.num_tokens, 1),
            "share_above_ln2": total.beyond_ln2 / max(total.num_tokens, 1),
            "not_finite": total.not_finite,
            "mean_abs_by_lag": {str(lag): sums.mean_abs for lag, sums in reading.by_lag.items()},
            "suspicion": None if suspicion is None else asdict(suspicion),
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        append_lines(self.file, json.dumps(facts) + "\n")


def noise_of_run(config: dict[str, Any]) -> Noise:
    allocation = config["allocation_mode"] or config["rollout"]["backend"]
    engine = config["vllm" if allocation.startswith("vllm") else "sglang"]
    return published_noise((str(config["actor"]["dtype"]), str(engine["dtype"])), has_experts=False)
