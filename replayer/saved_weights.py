"""Save the weights before some steps of a record, as Hugging Face models, in one replay."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from areal_core.engine.checkpoint.hf_folder import save_hf
from areal_core.trainer.rl import Observer, PPOTrainer
from recorder import Record, open_record
from replayer.errors import ReplayError
from replayer.goto import VisitFinished, compare_weights
from replayer.preconditions import nearest_anchor
from replayer.request import Request
from replayer.run import replay


def save_weights(record: str, steps: Sequence[int], folder: Path, model: str | None = None) -> None:
    """Save the weights before each step into `folder/VERSION`, adapters merged; a collective.

    Args:
        steps: ascending.
        model: current path of the model that the run started from, if it has moved.

    Raises:
        ReplayError: the weights before a step are not those of the recorded run, or its steps are
            missing.
    """

    def make_saver(record: Record, trainer: PPOTrainer, request: Request) -> Observer:
        def observe(event: str, **facts: Any) -> None:
            if event != "batch" or facts["step"] not in steps:
                return
            _, wrong = compare_weights(record, trainer, facts["step"])
            if wrong:
                raise ReplayError(
                    f"{record.path}: replayed up to step {facts['step']}, {len(wrong)} parameters differ from the "
                    f"recorded run, such as {wrong[0]}: replay it with the code and on the machine that recorded it"
                )
            save_hf(folder / str(facts["version"]), trainer.actor, trainer.tokenizer, merged=True)
            if facts["step"] == steps[-1]:
                raise VisitFinished

        return observe

    start = nearest_anchor(open_record(record), steps[0])
    with suppress(VisitFinished):
        replay(Request(record, steps[0] if start is None else start, steps[-1], model), [make_saver])
