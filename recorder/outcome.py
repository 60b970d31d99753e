"""Gathers the events of a step into its Outcome; the recorder stores it and the replayer compares it."""

from collections.abc import Callable
from typing import Any

from recorder.format import MicroBatch, Outcome


class OutcomeObserver:
    """An observer that calls `on_outcome(outcome)` once a step, with what this rank reported during it."""

    def __init__(self, on_outcome: Callable[[Outcome], None]) -> None:
        self.on_outcome = on_outcome
        self.micro_batches: list[MicroBatch] = []

    def __call__(self, event: str, **facts: Any) -> None:
        if event == "batch":
            self.micro_batches = []
        elif event == "micro_batch":
            self.micro_batches.append(parse_micro_batch(facts))
        elif event == "step":
            self.on_outcome(
                Outcome(
                    step=facts["step"],
                    version=facts["version"],
                    micro_batches=tuple(self.micro_batches),
                    stats={name: float(value) for name, value in facts["stats"].items()},
                    checksums=dict(facts["checksums"]),
                )
            )


def parse_micro_batch(facts: dict[str, Any]) -> MicroBatch:
    """The facts of a `micro_batch` event; scalars may be tensors."""
    return MicroBatch(
        minibatch=facts["minibatch"],
        micro_batch=facts["micro_batch"],
        rows=tuple(int(row) for row in facts["rows"]),
        num_tokens=int(facts["num_tokens"]),
        loss=float(facts["loss"]),
        weight=float(facts["weight"]),
    )
