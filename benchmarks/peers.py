"""Compare the suite with its peers, and write measurements/benchmarks.md: what `make bench` runs.

    python -m benchmarks.peers [--only TOPIC ...]

Each topic is a benchmark of this folder, run as its command says; what it prints by
`peer_results.report` becomes a row. Results are kept in measurements/benchmarks.json by topic, so a
topic may be measured again alone. Exits with 1 when a benchmark fails; its topic keeps its earlier
rows.
"""

import json
import os
import platform
import shlex
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.harness import MARK, SomeOf, read_options

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "docs/measurements/benchmarks.json", ROOT / "docs/measurements/benchmarks.md"
PACKAGES = ("torch", "transformers", "trl", "sglang", "safetensors", "zarr", "py-spy", "rldoctor", "rlprobe")


@dataclass(frozen=True)
class Topic:
    """A benchmark, and the heading of its rows."""

    name: str
    title: str
    command: str


TOPICS = [
    Topic("recording", "Recording a step", "recording --repeats 7"),
    Topic("replay", "A recorded and a replayed step", "step_cost --hidden 128 --rows 8 --rounds 3"),
    Topic("step", "A training step", "train_step --rounds 8"),
    Topic("ranks", "A training step on two ranks", "train_step --ranks 2 --rounds 8 --tokens 256"),
    Topic(
        "trl",
        "A GRPO step",
        "against_trl --threads 1 --rounds 1 --only grpo --questions 1 --samples 8 --prompt-tokens 512 "
        "--without trl_bf16,ours_packed",
    ),
    Topic("scoring", "Scoring log-probs", "scoring --tokens 100000"),
    Topic("memory", "Memory of log-probs", "logprob_memory"),
    Topic("hang", "Diagnosis of a hang", "hang_scale --ranks 1000 --frtrace 64 512"),
    Topic("collect", "Stacks of a hang", "hang_collect"),
    Topic("doctor", "Failures that two other doctors draw", "doctor_peers"),
]

HEADER = """# Compared with peers

`make bench` runs the scripts below and writes this page. Both sides of a row run in turn in one
process or as one pair of processes, so other load on the machine affects both. The ratio is theirs
to ours, median and range over the repeats: above 1, ours is cheaper. CPU seconds are of all threads
of a side.
"""


def run(topic: Topic) -> list[dict[str, Any]]:
    """Run a benchmark, show its output, and return its rows; end if it fails or reports none."""
    script, *arguments = shlex.split(topic.command)
    command = [sys.executable, "-m", f"benchmarks.{script}", *arguments]
    rows = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith(MARK):
                rows.append(json.loads(line.removeprefix(MARK)))
    if process.returncode or not rows:
        sys.exit(f"benchmarks.{topic.command} ended with {process.returncode} and reported {len(rows)} rows")
    return rows


def measure(topic: Topic) -> dict[str, Any]:
    """Return the rows of a topic, with the load of the machine around them."""
    before = os.getloadavg()[0]
    rows = run(topic)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "load": [round(before, 1), round(os.getloadavg()[0], 1)],
    } | {
        "machine": machine(),
        "versions": versions(),
        "rows": rows,
    }


def machine() -> str:
    """Return processor, cores and memory of this machine, in words."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model}, {os.cpu_count()} cores, {memory_gib:.0f} GiB"


def versions() -> str:
    """Return the versions of what is compared."""
    found = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def page(results: dict[str, Any]) -> str:
    """Return docs/measurements/benchmarks.md."""
    text = [HEADER]
    for topic in TOPICS:
        if topic.name not in results:
            continue
        result = results[topic.name]
        load = " to ".join(map(str, result["load"]))
        measured = f"{result['date']}, load average {load}."
        text.append(f"## {topic.title}\n\n```\npython -m benchmarks.{topic.command}\n```\n\n{measured}\n")
        text.append(table(result["rows"]))
    setups = sorted({(result["machine"], result["versions"]) for result in results.values()})
    text.append("## Machine and versions\n")
    for name, packages in setups:
        lines = textwrap.wrap(f"{name}: {packages}", 96, break_on_hyphens=False)
        text.append("* " + "\n  ".join(lines))
    return "\n".join(text) + "\n"


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown: a ratio each, or what a tool found."""
    if "tool" in rows[0]:
        lines = ["| runs | tool | failures named | healthy runs accused |", "|---|---|---|---|"]
        for row in rows:
            lines.append(
                f"| {row['what']} | {row['tool']} | {row['named']} of {row['failures']} | {row['accused']} of {row['healthy']} |"
            )
    else:
        lines = ["| what | beside | ours | theirs | ratio |", "|---|---|---|---|---|"]
        for row in rows:
            middle, low, high = row["ratio"]
            spread = f" ({low:.2f} to {high:.2f})" if low != high else ""
            lines.append(
                f"| {row['what']} | {row['beside']} | {number(row['ours'])} {row['unit']} | {number(row['theirs'])} {row['unit']} "
                f"| {middle:.2f}{spread} |"
            )
    return "\n".join(lines) + "\n"


def number(value: float) -> str:
    """Return three significant digits, or a whole number above 1,000."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def main() -> None:
    options = read_options(__doc__, only=SomeOf(topic.name for topic in TOPICS))
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for topic in TOPICS:
        if topic.name in options.only:
            print(f"== {topic.title}: benchmarks.{topic.command}", flush=True)
            results[topic.name] = measure(topic)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
