"""Record and replay a run of TRL: GRPOTrainer, SFTTrainer, DPOTrainer (docs/trainers/trl.md).

from areal_debug.trl import record, replay

record(trainer, "runs/r")      # before trainer.train()
replay(trainer, "runs/r")      # instead of trainer.train(), with a trainer built as for the run
layouts(build, "runs/r", 3)    # step 3 in 1, 2 and 4 micro-batches
"""

from replayer.errors import CannotReplay
from replayer.trl.observing import UnknownTrainer
from replayer.trl.one_step import run_layouts as layouts
from replayer.trl.recording import record
from replayer.trl.replaying import Replay, StepDifference, replay

__all__ = ["CannotReplay", "Replay", "StepDifference", "UnknownTrainer", "layouts", "record", "replay"]
