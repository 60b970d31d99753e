"""Rank 1 waits in an import for the lock of a dead extension build; peers in the rendezvous.

label: init_deadlock
culprits: 1
ranks: 2
"""

import os
import sys
import tempfile
from pathlib import Path

import torch.distributed as dist
from hang_point import here

EXTENSION = """
import time
from pathlib import Path

def wait_for_build(lock):
    while lock.exists():
        time.sleep(0.1)

wait_for_build(Path(__file__).with_name("lock"))
"""


def import_fused_kernels() -> None:
    folder = Path(tempfile.mkdtemp())
    (folder / "fused_kernels.py").write_text(EXTENSION)
    (folder / "lock").touch()
    sys.path.insert(0, str(folder))
    __import__("fused_kernels")


here()
if os.environ["RANK"] == "1":
    import_fused_kernels()
dist.init_process_group("gloo")
