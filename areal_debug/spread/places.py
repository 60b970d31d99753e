"""Where tasks run: in this process, one after the other, or on Ray."""

from collections.abc import Callable, Sequence

from areal_debug.render import with_progress
from areal_debug.spread.tasks import Outcome, Task, run_verb


def run_tasks(title: str, tasks: Sequence[Task], place: str | None, workers: int | None) -> list[Outcome]:
    """Run the tasks under a progress bar; return their outcomes in order.

    Args:
        place: "ray", or None for this process, one after the other.
        workers: tasks at a time on Ray; by default as many as it has CPUs for.

    Raises:
        ConfigError: there is no such Ray cluster, or no node of it has the CPUs for a task.
    """
    if place is None:
        if workers is not None:
            raise ValueError("--workers is the number of tasks at a time on Ray: give --on ray, too")
        return with_progress(title, len(tasks), lambda tick: [counted(task, tick) for task in tasks])
    from areal_debug.spread.on_ray import run_on_ray

    return with_progress(title, len(tasks), lambda tick: run_on_ray(tasks, workers, tick))


def counted(task: Task, tick: Callable[[object], None]) -> Outcome:
    """Run a task here and count it."""
    outcome = run_verb(task.arguments)
    tick(task)
    return outcome
