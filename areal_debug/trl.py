"""Record and replay a run of TRL: GRPOTrainer, SFTTrainer, DPOTrainer (docs/trainers/trl.md).

from areal_debug.trl import record, replay

record(trainer, "runs/r")      # before trainer.train()
replay(trainer, "runs/r")      # instead of trainer.train(), with a trainer built as for the run
"""

from replayer.trl.observing import UnknownTrainer
from replayer.trl.recording import record
from replayer.trl.replaying import CannotReplay, Replay, StepDifference, replay

__all__ = ["CannotReplay", "Replay", "StepDifference", "UnknownTrainer", "record", "replay"]
