"""Read the event files of TensorBoard."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from areal_core.safety.received import open_received
from areal_debug.doctor.sources.plain_files import Row, UnreadableRun

NUMBERS = (1, 2, 3, 9)  # float, double, int32, int64 of a TensorProto


def read_events(file: Path, run: str = "") -> Iterable[Row]:
    for other in file.parent.glob("events.out.tfevents.*"):  # it reads them all
        open_received(other).close()
    EventAccumulator, make_ndarray = import_reader()
    # 0 keeps all; the last tensors would be those of a histogram or an image, which are no numbers
    events = EventAccumulator(str(file.parent), size_guidance={"scalars": 0, "tensors": 0})
    try:
        events.Reload()
    except Exception as error:  # the boundary: a parser of others, on a file that may be anything
        raise UnreadableRun(f"{file} is no event file of TensorBoard: {type(error).__name__}") from error
    tags = events.Tags()
    for name in tags["scalars"]:
        for event in events.Scalars(name):
            yield {"step": event.step, name: event.value}
    for name in tags["tensors"]:  # of TensorFlow 2
        for event in events.Tensors(name):
            if event.tensor_proto.dtype in NUMBERS and not event.tensor_proto.tensor_shape.dim:
                yield {"step": event.step, name: float(make_ndarray(event.tensor_proto))}


def import_reader() -> tuple[Any, Any]:
    """Return TensorBoard's reader and its decoder of tensors; importing them takes a second."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    return EventAccumulator, make_ndarray
