"""Record and replay a run of TRL: GRPOTrainer, SFTTrainer, DPOTrainer (docs/trainers/trl.md).

from areal_debug.trl import record, replay

record(trainer, "runs/r")      # before trainer.train()
replay(trainer, "runs/r")      # instead of trainer.train(), with a trainer built as for the run
"""

from areal_debug.trl.compare import StepDifference
from areal_debug.trl.known import UnknownTrainer
from areal_debug.trl.recording import record
from areal_debug.trl.replaying import CannotReplay, Replay, replay

__all__ = ["CannotReplay", "Replay", "StepDifference", "UnknownTrainer", "record", "replay"]
