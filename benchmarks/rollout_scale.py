"""The table of docs/chaos.md: `areal-debug rollout-sim` at 8, 64 and 512 servers.

Each row is the run with the median lag of `--rounds`. Prints the table, and with `--write` replaces
the one in the document. On a busy machine lags are those of the machine.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parents[1] / "docs" / "chaos.md"
SIZES = ((8, 10_000), (64, 50_000), (512, 50_000))  # servers, requests
COLUMNS = (
    "servers",
    "requests",
    "max_lag_ms",
    "cpu_s",
    "requests_per_s",
    "lost",
    "doubled",
    "oldest_version_lag",
)
TABLE = re.compile(r"\| servers \|.*?(?=\n\n|\Z)", re.DOTALL)


def measure(servers: int, requests: int, seed: int) -> dict[str, Any]:
    """Run one simulation in a process of its own."""
    options = ["--servers", str(servers), "--requests", str(requests), "--seed", str(seed), "--json"]
    command = [sys.executable, "-m", "areal_debug", "rollout-sim", *options]
    return json.loads(subprocess.run(command, capture_output=True, text=True).stdout)


def cell(name: str, value: float) -> str:
    """Format a number of the table."""
    return f"{value:.1f}" if name == "cpu_s" else f"{value:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="replace the table of the document")
    options = parser.parse_args()
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for servers, requests in SIZES:
        rounds = [measure(servers, requests, seed) for seed in range(1, options.rounds + 1)]
        median = sorted(rounds, key=lambda facts: facts["max_lag_ms"])[len(rounds) // 2]
        lines.append("| " + " | ".join(cell(name, median[name]) for name in COLUMNS) + " |")
        print(lines[-1], flush=True)
    table = "\n".join(lines)
    print(table)
    if options.write:
        DOCUMENT.write_text(TABLE.sub(table, DOCUMENT.read_text(), count=1))


if __name__ == "__main__":
    main()
