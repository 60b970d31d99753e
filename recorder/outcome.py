"""Collect the events of a step into its Outcome, for the recorder and the replayer.

Besides the trainer's events it accepts `checksums`, with `of` "gradients" or "weights" and `values`
by parameter, two per minibatch, from an observer that knows the model and handles the trainer's
`gradients` and `optimizer` events.
"""

from collections.abc import Callable
from typing import Any

from recorder.format import MicroBatch, Minibatch, Outcome


class OutcomeObserver:
    """An observer that calls `on_outcome(outcome)` once per step, with this rank's facts."""

    def __init__(self, on_outcome: Callable[[Outcome], None]) -> None:
        self.on_outcome = on_outcome
        self.micro_batches: list[MicroBatch] = []
        self.checksums: dict[str, list[dict[str, str]]] = {"gradients": [], "weights": []}

    def __call__(self, event: str, **facts: Any) -> None:
        if event == "batch":
            self.micro_batches = []
            self.checksums = {"gradients": [], "weights": []}
        elif event == "checksums":
            self.checksums[facts["of"]].append(facts["values"])
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
                    minibatches=tuple(map(Minibatch, self.checksums["gradients"], self.checksums["weights"])),
                )
            )


def parse_micro_batch(facts: dict[str, Any]) -> MicroBatch:
    return MicroBatch(
        minibatch=facts["minibatch"],
        micro_batch=facts["micro_batch"],
        rows=tuple(int(row) for row in facts["rows"]),
        num_tokens=int(facts["num_tokens"]),
        loss=float(facts["loss"]),
        weight=float(facts["weight"]),
    )
