"""What happens when an alarm is found during a run: a command, a webhook, stop, pause.

Hooks run beside training and never in it: one that fails is one sentence, and nothing else changes.
"""

import http.client
import json
import os
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from areal_core.safety.printable import printable
from areal_core.safety.secrets import masker
from areal_debug.doctor.alarm import findings
from hangdoctor.collect.process import descendants, process_table, read_stat
from hangdoctor.watch.loop import lives, signal_all

Report = Callable[[str], None]
COMMAND_TIMEOUT_S, WEBHOOK_TIMEOUT_S = 60.0, 10.0
PAUSE_TIMEOUT_S = 30.0  # a process in uninterruptible sleep stops when its system call returns
LONGEST_FACT = 2000
SEVERITIES = ("error", "warning")
STOPPED = "T"  # state of a process after SIGSTOP


@dataclass(frozen=True)
class Hooks:
    """What to do for an alarm.

    `stop_on` and `pause_on` hold ids of alarms, severities, or "all".
    """

    command: str = ""
    webhook: str = ""
    stop_on: frozenset[str] = frozenset()
    pause_on: frozenset[str] = frozenset()


NO_HOOKS = Hooks()


def make_hooks(command: str, webhook: str, stop_on: str, pause_on: str) -> Hooks:
    """Check the options of a command line. Raises ValueError, without the secrets of an address."""
    if webhook and (urlsplit(webhook).scheme not in ("http", "https") or not urlsplit(webhook).hostname):
        raise ValueError("--webhook is no http:// or https:// address with a host")
    return Hooks(command, webhook, choice("--stop-on", stop_on), choice("--pause-on", pause_on))


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
    """Run the command and call the webhook for an alarm; failures are reported."""
    facts = facts_of(alarm, run)
    if hooks.command:
        run_command(hooks.command, facts, report)
    if hooks.webhook:
        call_webhook(hooks.webhook, facts, report)


def facts_of(alarm: Mapping[str, Any], run: str) -> dict[str, str]:
    """Return what hooks are given: no config, no samples, no paths but the run's name."""
    first = alarm["evidence"][0][0] if alarm["evidence"] else ""
    step = alarm["onset"] if alarm.get("onset") is not None else first
    facts = {
        "run": run,
        "id": alarm["id"],
        "severity": alarm["severity"],
        "title": alarm["title"],
        "metric": alarm["metric"],
        "step": str(step),
        "found": alarm["found"],
        "advice": alarm["advice"][0] if alarm["advice"] else "",
    }
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


def opener() -> urllib.request.OpenerDirector:
    made = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPDefaultErrorHandler(),
    ):
        made.add_handler(handler)
    return made


def call_webhook(url: str, facts: Mapping[str, str], report: Report) -> None:
    """Send the facts as JSON, with a sentence as Slack (`text`) and Discord (`content`) show it."""
    text = f"{facts['run']}: {facts['id']} {facts['title']} (step {facts['step']}): {facts['found']}"
    body = json.dumps({"text": text, "content": text[:LONGEST_FACT], "alarm": facts}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")
    failure = [f"no answer in {WEBHOOK_TIMEOUT_S:g} s"]

    def send() -> None:
        try:
            with opener().open(request, timeout=WEBHOOK_TIMEOUT_S):
                failure.clear()
        except urllib.error.HTTPError as error:
            failure[:] = [f"status {error.code}"]
        except (OSError, ValueError, http.client.HTTPException) as error:
            failure[:] = [type(getattr(error, "reason", error)).__name__]

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    thread.join(WEBHOOK_TIMEOUT_S)  # a timeout of the socket alone would begin again with each byte
    if failure:
        report(f"the webhook at {urlsplit(url).hostname} was not reached: {failure[0]}")


def stop(pid: int) -> None:
    """Send SIGTERM to a run's launcher, which ends its ranks."""
    signal_all((pid,), signal.SIGTERM)


def pause(pid: int) -> bool:
    """Stop a launcher and every process below it, and return whether the launcher is stopped.

    A signal is sent before it acts: the state of the launcher is waited for.
    """
    signal_all(tree_of(pid), signal.SIGSTOP)
    end = time.monotonic() + PAUSE_TIMEOUT_S
    while not (stopped := is_paused(pid)) and lives(pid) and time.monotonic() < end:
        time.sleep(0.01)
    return stopped


def is_paused(pid: int) -> bool:
    """Return whether a process is stopped."""
    stat = read_stat(pid)
    return stat is not None and stat.state == STOPPED


def continue_all(pid: int) -> None:
    signal_all(tree_of(pid), signal.SIGCONT)


def tree_of(pid: int) -> tuple[int, ...]:
    """Return a process and every one below it."""
    return (pid, *descendants((pid,), process_table()))
