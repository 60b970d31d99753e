"""Three doctors on the runs that two of them draw: ours, rldoctor and rlprobe.

    python -m benchmarks.doctor_peers [--seeds 5] [--healthy 20] [--steps 400]

Every run is given to each: to ours and to rldoctor under TRL's names, to rlprobe in its own
columns. A failure counts as named if one of the findings of doctor_plants/drawn.yaml is given,
which is generous where a tool has no finding of that name. Findings of lower rank than a warning do
not count. Needs rldoctor and rlprobe (`make bench`).
"""

import argparse
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from benchmarks.doctor_generators import DRAWN, GENERATORS, TRL, Collected, Row, judge, named
from benchmarks.harness import read_options, report_rate


def found_by_rldoctor(rows: list[Row]) -> set[str]:
    """Return the names of rldoctor's warnings and failures."""
    from rl_doctor import Severity, diagnose, run_from_records

    findings = diagnose(run_from_records(rows)).findings
    return {one.detector for one in findings if one.severity >= Severity.WARNING}


def found_by_rlprobe(rows: list[Row], own: list[Row] | None = None) -> set[str]:
    """Return the names of rlprobe's warnings and critical findings; `own` are its own columns."""
    from rlprobe.doctor.engine import diagnose_view
    from rlprobe.doctor.runview import RunView
    from rlprobe.schemas import RunManifest, StepRecord

    steps = [StepRecord(**row) for row in (own or [columns_of_rlprobe(row) for row in rows])]
    manifest = RunManifest(run_id="run", created_at="2026-01-01T00:00:00+00:00", algorithm="grpo")
    return {one.signature_id for one in diagnose_view(RunView(manifest, steps)) if one.severity != "info"}


def columns_of_rlprobe(row: Row) -> Row:
    """Return a row under TRL's names in the columns of rlprobe."""
    own = {column: row[name] for column, name in TRL.items() if name in row}
    components = {
        name.split("/")[1]: value
        for name, value in row.items()
        if name.startswith("rewards/") and name.endswith("/mean")
    }
    known = {name: row[name] for name in ("step", "reward_std", "grad_norm", "loss") if name in row}
    return {"timestamp": float(row["step"]), "reward_components": components} | known | own


def measure(
    generator: str, options: argparse.Namespace, folder: Path
) -> tuple[Counter[str], int, Counter[str], int]:
    """Return runs named by each tool, failing runs, healthy runs accused by each, healthy runs."""
    rows_of: Callable[[str, int, int], list[Row]] = GENERATORS[generator][1]
    right: Counter[str] = Counter()
    accused: Counter[str] = Counter()
    for failure, wanted in DRAWN[generator].items():
        for seed in range(options.seeds):
            rows = rows_of(failure, options.steps, seed)
            own = list(Collected.rows) if generator == "rlprobe" else None
            right["areal-debug"] += named(judge(rows, "trl", folder), wanted) is not None
            right["rldoctor"] += bool(found_by_rldoctor(rows) & set(wanted["rldoctor"]))
            right["rlprobe"] += bool(found_by_rlprobe(rows, own) & set(wanted["rlprobe"]))
    for seed in range(options.healthy):
        rows = rows_of("healthy", options.steps, seed)
        own = list(Collected.rows) if generator == "rlprobe" else None
        accused["areal-debug"] += bool(judge(rows, "trl", folder)["alarms"])
        accused["rldoctor"] += bool(found_by_rldoctor(rows))
        accused["rlprobe"] += bool(found_by_rlprobe(rows, own))
    return right, len(DRAWN[generator]) * options.seeds, accused, options.healthy


def main() -> None:
    """Print a line for each corpus and tool."""
    options = read_options(__doc__, seeds=5, healthy=20, steps=400)
    with tempfile.TemporaryDirectory() as name:
        for generator in GENERATORS:
            right, total, accused, healthy = measure(generator, options, Path(name))
            for tool in ("areal-debug", "rldoctor", "rlprobe"):
                report_rate(f"drawn by {generator}", tool, (right[tool], total), (accused[tool], healthy))


if __name__ == "__main__":
    main()
