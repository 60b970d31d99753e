"""slime and miles: `--custom-rollout-log-function-path areal_debug.slime.record`."""

from recorder.trainers.slime import record

__all__ = ["record"]
