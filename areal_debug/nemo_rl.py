"""NeMo-RL: `logger = Recorded(logger, "runs/r")`, after `setup(...)`."""

from recorder.trainers.nemo_rl import Recorded

__all__ = ["Recorded"]
