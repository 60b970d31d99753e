"""The tiny run of tests/debug; it is killed in step KILL_IN_STEP, unless it was started again after that."""

import os
import runpy
from pathlib import Path

if os.environ["AREAL_RECOVER_RUN"] == "1" or os.environ["RANK_TO_KILL"] != os.environ.get("RANK", "0"):
    os.environ.pop("KILL_IN_STEP", None)
runpy.run_path(str(Path(__file__).parents[1] / "debug" / "train_tiny.py"), run_name="__main__")
