"""The tiny run of tests/debug, in which RANK_TO_KILL is killed in step KILL_IN_STEP.

A restarted run is not killed. Every rank observes, because checksums are a collective of observed
ranks.
"""

import os
import runpy
from pathlib import Path

if os.environ["AREAL_RECOVER_RUN"] == "1" or os.environ["RANK_TO_KILL"] != os.environ.get("RANK", "0"):
    os.environ["KILL_IN_STEP"] = "-1"
runpy.run_path(str(Path(__file__).parents[1] / "debug" / "train_tiny.py"), run_name="__main__")
