"""Three doctors on the runs that two of them draw: ours, rldoctor and rlprobe.

    python benchmarks/doctor_peers.py [--seeds 5] [--healthy 20] [--steps 400]

Every run is given to each: to ours and to rldoctor under TRL's names, to rlprobe in its own
columns. A failure counts as named if one of the findings of `NAMES` is given, which is generous
where a tool has no finding of that name; an empty entry is a failure that a tool does not look for.
Findings of lower rank than a warning do not count. Needs rldoctor and rlprobe (`make bench`).
"""

import argparse
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from doctor_generators import EXPECTED, GENERATORS, TRL, Collected, Row, judge, named
from peer_results import report_rate

# Failure: the findings of rldoctor and of rlprobe that name it.
NAMES: dict[str, dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "rldoctor": {
        "entropy_collapse": (("entropy_collapse",), ("ENTROPY_COLLAPSE",)),
        "saturated_groups": (("advantage_collapse",), ("DEGENERATE_GROUPS", "ADV_COLLAPSE", "REWARD_STD_DEATH")),
        "too_hard": (("advantage_collapse",), ("DEGENERATE_GROUPS", "ADV_COLLAPSE", "REWARD_STD_DEATH")),
        "reward_hacking": (("reward_hacking",), ("REWARD_HACK_LENGTH", "FORMAT_GAMING")),
        "length_hacking": (("length_pathology",), ("REWARD_HACK_LENGTH",)),
        "truncation": (("length_pathology",), ("TRUNCATION_STARVE",)),
        "kl_blowup": (("kl_drift",), ("KL_BLOWUP",)),
        "clip_saturation": (("clip_saturation",), ("CLIP_SATURATION",)),
        "grad_spikes": (("gradient_pathology",), ("GRAD_PATHOLOGY",)),
        "plateau": (("plateau",), ()),
        "format_domination": (("reward_composition",), ("FORMAT_GAMING",)),
    },
    "rlprobe": {
        "kl_blowup": (("kl_drift",), ("KL_BLOWUP",)),
        "entropy_collapse": (("entropy_collapse",), ("ENTROPY_COLLAPSE",)),
        "reward_hack_length": (("length_pathology", "reward_hacking"), ("REWARD_HACK_LENGTH",)),
        "format_gaming": (("reward_composition",), ("FORMAT_GAMING",)),
        "clip_saturation": (("clip_saturation",), ("CLIP_SATURATION",)),
        "degenerate_groups": (("advantage_collapse",), ("DEGENERATE_GROUPS",)),
        "adv_collapse": (("advantage_collapse",), ("ADV_COLLAPSE",)),
        "value_divergence": ((), ("VALUE_DIVERGENCE",)),
        "grad_pathology": (("gradient_pathology",), ("GRAD_PATHOLOGY",)),
        "truncation_starve": (("length_pathology",), ("TRUNCATION_STARVE",)),
        "repetition_spiral": (("length_pathology", "entropy_collapse"), ("REPETITION_SPIRAL",)),
        "reward_std_death": (("advantage_collapse",), ("REWARD_STD_DEATH", "DEGENERATE_GROUPS")),
        "ref_drift_asymmetry": (("kl_drift",), ("REF_POLICY_DRIFT_ASYMMETRY", "KL_BLOWUP")),
        "throughput_rot": ((), ("THROUGHPUT_ROT",)),
    },
}  # fmt: skip


def found_by_rldoctor(rows: list[Row]) -> set[str]:
    """Return the names of rldoctor's warnings and failures."""
    from rl_doctor import Severity, diagnose, run_from_records

    findings = diagnose(run_from_records(rows)).findings
    return {one.detector for one in findings if one.severity >= Severity.WARNING}


def found_by_rlprobe(rows: list[Row], own: list[Row] | None) -> set[str]:
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


def found_by_ours(rows: list[Row], folder: Path) -> dict[str, Any]:
    """Return what `areal-debug doctor` reports."""
    return judge(rows, "trl", folder)


def measure(
    generator: str, options: argparse.Namespace, folder: Path
) -> tuple[Counter[str], int, Counter[str], int]:
    """Return runs named by each tool, failing runs, healthy runs accused by each, healthy runs."""
    rows_of: Callable[[str, int, int], list[Row]] = GENERATORS[generator][1]
    right: Counter[str] = Counter()
    accused: Counter[str] = Counter()
    for failure, (of_rldoctor, of_rlprobe) in NAMES[generator].items():
        for seed in range(options.seeds):
            rows = rows_of(failure, options.steps, seed)
            own = list(Collected.rows) if generator == "rlprobe" else None
            right["areal-debug"] += (
                named(found_by_ours(rows, folder), EXPECTED[generator][failure]) is not None
            )
            right["rldoctor"] += bool(found_by_rldoctor(rows) & set(of_rldoctor))
            right["rlprobe"] += bool(found_by_rlprobe(rows, own) & set(of_rlprobe))
    for seed in range(options.healthy):
        rows = rows_of("healthy", options.steps, seed)
        own = list(Collected.rows) if generator == "rlprobe" else None
        accused["areal-debug"] += bool(found_by_ours(rows, folder)["alarms"])
        accused["rldoctor"] += bool(found_by_rldoctor(rows))
        accused["rlprobe"] += bool(found_by_rlprobe(rows, own))
    return right, len(NAMES[generator]) * options.seeds, accused, options.healthy


def main() -> None:
    """Print a line for each corpus and tool."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--healthy", type=int, default=20, help="healthy runs of each corpus")
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        for generator in NAMES:
            right, total, accused, healthy = measure(generator, options, Path(name))
            for tool in ("areal-debug", "rldoctor", "rlprobe"):
                report_rate(f"drawn by {generator}", tool, (right[tool], total), (accused[tool], healthy))


if __name__ == "__main__":
    main()
