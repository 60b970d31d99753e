"""Read the event files of TensorBoard: records of a length, a message, and a checksum of each.

TensorBoard's own reader computes the checksums in Python. Its messages are decoded here as well;
what follows the first damaged record of a file is left out, as there.
"""

import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from crc32c import crc32c

from areal_core.safety.received import UnreadableFile, open_received
from areal_debug.doctor.sources.plain_files import Row, UnreadableRun

NUMBERS = (1, 2, 3, 9)  # float, double, int32, int64 of a TensorProto
RESTARTED = 1  # SessionLog.START: steps from this one on were lost
HEAD = struct.Struct("<QI")


def read_events(file: Path, run: str = "") -> Iterable[Row]:
    """Return what a folder's event files logged, one row for the events of a step in turn."""
    event_type, make_ndarray = import_reader()
    rows: list[dict[str, Any]] = []
    try:
        for record in (r for path in sorted(file.parent.glob("*tfevents*")) for r in records_of(path)):
            event = event_type.FromString(record)
            if event.session_log.status == RESTARTED:
                rows = [row for row in rows if row["step"] < event.step]
            values = {v.tag or v.node_name: number_of(v, make_ndarray) for v in event.summary.value}
            values = {name: value for name, value in values.items() if value is not None and name != "step"}
            if values and rows and rows[-1]["step"] == event.step:
                rows[-1].update(values)
            elif values:
                rows.append({"step": event.step, **values})
    except Exception as error:  # the boundary: a decoder of others, on a file that may be anything
        if isinstance(error, UnreadableFile):
            raise
        raise UnreadableRun(f"{file} is no event file of TensorBoard: {type(error).__name__}") from error
    return rows


def number_of(value: Any, make_ndarray: Any) -> float | None:
    if value.HasField("simple_value"):
        return value.simple_value
    tensor = value.tensor  # of TensorFlow 2
    is_number = tensor.dtype in NUMBERS and not tensor.tensor_shape.dim
    return float(make_ndarray(tensor)) if is_number else None


def records_of(path: Path) -> Iterator[bytes]:
    """Yield the intact records of a file."""
    with open_received(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        while len(head := file.read(HEAD.size)) == HEAD.size:
            size, checksum = HEAD.unpack(head)
            if masked_checksum(head[:8]) != checksum or size > size_bytes:
                return
            record, end = file.read(size), file.read(4)
            if len(record) < size or end != masked_checksum(record).to_bytes(4, "little"):
                return
            yield record


def masked_checksum(data: bytes) -> int:
    """Return the crc32c as TFRecord stores it, so that a record may hold one itself."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def import_reader() -> tuple[Any, Any]:
    """Return TensorBoard's message of an event and its decoder of tensors."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.util.tensor_util import make_ndarray

    return Event, make_ndarray
