"""Check the steps of one record in blocks, here or on Ray; `verify` takes what they say."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from areal_debug.confined import reads_untrusted
from areal_debug.render import count, errors_as_sentences, note, print_json
from areal_debug.spread.places import run_tasks
from areal_debug.spread.step_ranges import in_range
from areal_debug.spread.tasks import Task

BLOCK = 8  # steps of a task


def facts_of_steps(record: Path, place: str | None, workers: int | None) -> dict[str, Any]:
    """Return the facts of each step by its number, in JSON types; of blocks that failed none.

    A step that lacks them is checked by `verify` itself.
    """
    from recorder.archive.confined import in_child
    from recorder.verify import numbered_steps

    steps: list[int] = in_child(lambda: numbered_steps(record), [record])
    blocks = [steps[first : first + BLOCK] for first in range(0, len(steps), BLOCK)]
    ranges = [f"{block[0]}:{block[-1] + 1}" for block in blocks]
    tasks = [
        Task(f"steps {steps}", ("record", "verify", f"--facts={steps}", "--", str(record)))
        for steps in ranges
    ]
    found: dict[str, Any] = {}
    for task, outcome in zip(tasks, run_tasks("verifying", tasks, place, workers), strict=True):
        if outcome.num_retries:
            times = count(outcome.num_retries, "time")
            note(f"{task.name}: its worker died, and it was run again, {times}")
        if outcome.error is not None:
            note(f"{task.name}: checked here, because {outcome.error}")
        else:
            found |= outcome.report
    return found


@reads_untrusted("record")
@errors_as_sentences
def print_facts(record: Path, step_range: str) -> None:
    from recorder.verify import check_steps, numbered_steps

    found = check_steps(record, in_range(numbered_steps(record), step_range))
    print_json({step: asdict(facts) for step, facts in found.items()})
