"""Options of recording, chosen once when a run is started."""

from dataclasses import dataclass, field

from recorder.format import Recording
from recorder.retention import Retention


@dataclass(frozen=True)
class RecordingOptions:
    """How a run is recorded.

    Attributes:
        text: also store decoded prompts and completions.
        overwrite: replace an existing record, unless the run resumes it.
        first_step: not 0 for a resumed run, which then resumes its record if there is one.
        queue_steps: how many steps may be queued for the disk; 0 writes each step synchronously.
        when_slow: what a full queue does: "wait" or "drop" the step.
        when_failing: "stop" the run, or "continue" without recording.
    """

    recording: Recording = field(default_factory=Recording)
    text: bool = False
    overwrite: bool = False
    first_step: int = 0
    queue_steps: int = 0
    when_slow: str = "wait"
    when_failing: str = "stop"
    retention: Retention = field(default_factory=Retention)
