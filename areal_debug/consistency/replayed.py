"""The weights before steps of a record, made by a replay of it up to them."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recorder import Record


@contextmanager
def replayed_weights(
    record: "Record", steps: Sequence[int], model: str | None = None
) -> Iterator[dict[str, Path]]:
    """Yield the folders of the weights before each of ascending steps, by weight version.

    Args:
        model: folder of the model that the run started from, if it has moved.

    Raises:
        ReplayError: the record cannot be replayed up to the last step.
    """
    from areal_debug.replay.ranks import replay_ranks, report_of_ranks, task
    from replayer.preconditions import check_anchor, check_model, check_steps_present

    check_steps_present(record, steps[0], steps[-1])
    check_anchor(record, steps[0])
    check_model(record, model, steps[0])
    with tempfile.TemporaryDirectory() as folder:
        asked = task("weights", record=record.path, steps=list(steps), folder=folder, model=model)
        with replay_ranks() as ranks:
            report_of_ranks(ranks, asked, record.header.world_size, quiet=True)
        yield {made.name: made for made in Path(folder).iterdir() if made.name.isdigit()}
