"""How a run is recorded, chosen once by whoever starts it."""

from dataclasses import dataclass, field

from recorder.format import Recording
from recorder.retention import Retention


@dataclass(frozen=True)
class RecordingOptions:
    """How a run is recorded. `queue_steps` is how many steps may wait for the disk; 0 makes the run wait for each.

    `when_slow` is what a full queue does: "wait" or "drop" the step. `when_failing`: "stop" the run, or "continue" without recording.
    `text` also stores decoded prompts and completions. A run that continues, whose `first_step` is not 0, goes on with its record that
    is already there; otherwise `overwrite` clears it.
    """

    recording: Recording = field(default_factory=Recording)
    text: bool = False
    overwrite: bool = False
    first_step: int = 0
    queue_steps: int = 0
    when_slow: str = "wait"
    when_failing: str = "stop"
    retention: Retention = field(default_factory=Retention)
