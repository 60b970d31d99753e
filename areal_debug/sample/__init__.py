"""The sample run of the wheel: a record whose policy collapsed, and the stacks of a job that hung.

The record is of the training script beside it, which pays 0.5 for an answer that ends: the policy
learns to end at once. The stacks are those of `examples/hang.py` on three ranks.
"""

import tempfile
import zipfile
from pathlib import Path

UNPACKED = "areal-debug-sample"


def unpacked() -> Path:
    """Unpack the sample into the current folder, once, and return its folder.

    Raises FileExistsError if something else has its name.
    """
    folder = Path(UNPACKED)
    if not folder.exists():
        with (
            zipfile.ZipFile(Path(__file__).with_name("sample.zip")) as packed,
            tempfile.TemporaryDirectory(dir=".") as near,
        ):
            packed.extractall(Path(near, UNPACKED))
            Path(near, UNPACKED).rename(folder)
    if not (folder / "record" / "record.json").is_file():
        raise FileExistsError(f"{folder} exists and is not the sample: move it, or go to another folder")
    return folder
