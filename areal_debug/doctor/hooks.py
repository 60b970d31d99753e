"""What happens when an alarm is found during a run: a command, and the run's end.

Hooks run beside training and never in it: one that fails is one sentence, and nothing else changes.
"""

import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from areal_core.safety.printable import printable
from areal_core.safety.secrets import masker
from areal_debug.doctor.alarm import findings
from hangdoctor.watch.loop import signal_all

Report = Callable[[str], None]
COMMAND_TIMEOUT_S = 60.0
LONGEST_FACT = 2000
SEVERITIES = ("error", "warning")


@dataclass(frozen=True)
class Hooks:
    """What to do for an alarm.

    `stop_on` holds ids of alarms, severities, or "all".
    """

    command: str = ""
    stop_on: frozenset[str] = frozenset()


NO_HOOKS = Hooks()


def make_hooks(command: str, stop_on: str) -> Hooks:
    """Check the options of a command line. Raises ValueError for a finding that does not exist."""
    return Hooks(command, choice("--stop-on", stop_on))


def choice(option: str, text: str) -> frozenset[str]:
    """Return the alarms of a list with commas. Raises ValueError for what is none."""
    chosen = frozenset(word.strip() for word in text.split(",") if word.strip())
    for word in chosen - {*SEVERITIES, "all", *findings()}:
        raise ValueError(
            f"{option} {word!r} is no finding: expected ids as D17 or S03 (up to {max(findings())}), "
            "error, warning or all"
        )
    return chosen


def is_chosen(alarm: Mapping[str, Any], chosen: frozenset[str]) -> bool:
    return not chosen.isdisjoint({"all", alarm["id"], alarm["severity"]})


def run_hooks(alarm: Mapping[str, Any], run: str, hooks: Hooks, report: Report) -> None:
    """Run the command for an alarm; a failure is reported."""
    if hooks.command:
        run_command(hooks.command, facts_of(alarm, run), report)


def facts_of(alarm: Mapping[str, Any], run: str) -> dict[str, str]:
    """Return what hooks are given: no config, no samples, no paths but the run's name."""
    first = alarm["evidence"][0][0] if alarm["evidence"] else ""
    step = alarm["onset"] if alarm.get("onset") is not None else first
    facts = {name: alarm[name] for name in ("id", "severity", "title", "metric", "found")}
    facts |= {"run": run, "step": str(step), "advice": "".join(alarm["advice"][:1])}
    return {name: masker().text(printable(text, LONGEST_FACT)) for name, text in facts.items()}


def run_command(command: str, facts: Mapping[str, str], report: Report) -> None:
    """Run a shell command with the facts in AREAL_DEBUG_ALARM_ID, _TITLE and so on."""
    variables = {f"AREAL_DEBUG_ALARM_{name.upper()}": text for name, text in facts.items()}
    try:
        done = subprocess.run(
            command, shell=True, env=os.environ | variables, timeout=COMMAND_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        report(f"the command of --on-alarm did not end in {COMMAND_TIMEOUT_S:g} s and was killed")
    except OSError as error:
        report(f"the command of --on-alarm could not be started: {error.strerror}")
    else:
        if done.returncode:
            report(f"the command of --on-alarm ended with status {done.returncode}")


def stop(pid: int) -> None:
    """Send SIGTERM to a run's launcher, which ends its ranks."""
    signal_all((pid,), signal.SIGTERM)
