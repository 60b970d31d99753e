"""A record with every kind of file, and the seal of a JSON file, which anybody can compute again."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recorder import Recording, RecordingOptions, Retention, commit_anchor
from recorder.documents import checksum
from recorder.testing import scripted_batch, send_step
from tests.recorder.ranks import begin, on_ranks


class Words:
    """A tokenizer whose tokens are numbers."""

    name_or_path = "words"

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def write_full_record(
    folder: Path,
    num_ranks: int = 1,
    num_steps: int = 5,
    batch: Callable[[int, int], dict[str, Any]] = lambda step, rank: scripted_batch([3, 8, 6, 4], seed=step),
    text: bool = False,
) -> None:
    """Write the last three of some steps, with plans, an anchor and gaps; batches by step and rank."""
    options = RecordingOptions(Recording("full"), text=text, retention=Retention(keep_last=3))
    writers = begin(folder, num_ranks, options)

    def run(rank: int) -> None:
        writers[rank].tokenizer = Words()
        for step in range(num_steps):
            send_step(writers[rank], step, batch(step, rank))
        writers[rank]("end", steps=num_steps, error=None)

    assert on_ranks(num_ranks, run) == [None] * num_ranks
    anchor = folder / "anchors/000002"
    anchor.mkdir(parents=True)
    (anchor / "model.distcp").write_bytes(b"weights")
    commit_anchor(anchor, step=2)


def sealed(text: str) -> bytes:
    """A JSON object with its checksum as the last member, as every sealed file ends."""
    document = re.sub(r',? ?"crc32c": "[0-9a-f]{8}"\}$', "}", text.strip())
    body = document.removesuffix("}").encode("utf-8", "surrogatepass")
    return body + f',\n "crc32c": "{checksum(body)}"\n}}\n'.encode()
