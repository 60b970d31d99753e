"""The process that watches the ranks of one node, and prints the diagnosis of a hang."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from areal_core.safety.private import keep_files_private
from areal_debug.hang.watch import post_mortem
from hangdoctor.collect.pyspy import Options
from hangdoctor.collect.write import read_manifest
from hangdoctor.model import Diagnosis
from hangdoctor.watch.liveness import Limits
from hangdoctor.watch.loop import Plan, watch_registered

NOT_HUNG = "straggler_or_not_hung"
POLL_S = 0.5
MAX_INTERVAL_S = 5.0


def main(arguments: Sequence[str]) -> None:
    """Watch the ranks of a folder: STATE FOLDER notify|end [TIMEOUT_S]."""
    keep_files_private()
    state, folder, then, *timeout = arguments
    timeout_s = float(timeout[0]) if timeout else None
    limits = Limits() if timeout_s is None else Limits(timeout_s, 2 * timeout_s)
    interval_s = MAX_INTERVAL_S if timeout_s is None else min(MAX_INTERVAL_S, timeout_s / 4)
    options = Options(num_samples=3, interval_s=interval_s, registered=Path(state))
    plan = Plan(Path(folder), limits, POLL_S, "kill" if then == "end" else "notify", options=options)
    watch_registered(Path(state), plan, diagnose, report)


def diagnose(folder: Path) -> Diagnosis:
    """Diagnose a collection, as `areal-debug hang watch` does; print the complete report."""
    from areal_debug.hang.render import report as full_report

    diagnosis = post_mortem(folder)
    if diagnosis.label != NOT_HUNG:
        refused = [process.detail for process in read_manifest(folder).processes if process.detail]
        if refused:
            report(f"ranks wrote their own stacks, since py-spy may not read them: {refused[0]}")
        report(f"{full_report(diagnosis)}", "")
    return diagnosis


def report(text: str, start: str = "areal-debug watch: ") -> None:
    """Print on standard error, which is that of the rank that started us, while it is open."""
    with suppress(OSError, ValueError):
        sys.stderr.write(f"{start}{text}\n")
