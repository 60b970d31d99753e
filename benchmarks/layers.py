"""How often `consistency --layers` names the layer and the operator of a planted fault.

    python -m benchmarks.layers                      every fault of layer_faults.py, and sound pairs
    python -m benchmarks.layers --dtype bfloat16 --verbose  one dtype, a line per fault

A sound pair computes the same with other kernels: another attention, a prompt and then one token
at a time through the cache, or the embedded engine.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from areal_core.engine.model import own_attention, set_attention
from benchmarks.harness import read_options
from benchmarks.layer_faults import FAMILIES, FAULTS, Fault, make_model
from consistency.layers.judge import (
    LayersReport,
    compare_layers,
    reference_of,
)
from consistency.layers.observed import (
    Row,
    embedded,
    observe,
    own_forward,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main() -> None:
    """Print the counts, and every wrong answer."""
    options = read_options(__doc__, dtype=list(DTYPES), verbose=False)
    torch.set_num_threads(1)
    rows = make_rows((48, 40, 32, 24))
    found: dict[str, Any] = {}
    for dtype in options.dtype:
        counts: Counter[str] = Counter()
        for fault in FAULTS:
            report = report_of(fault, DTYPES[dtype], rows)
            answer = outcome(fault, report)
            counts[answer] += 1
            if options.verbose or answer != "right":
                print(f"{dtype} {fault.family}: {fault.name}: {answer}: {named(report)}", file=sys.stderr)
        for name, report in sound_pairs(DTYPES[dtype], rows):
            counts["sound"] += 1
            counts["accused"] += report.verdict != "healthy"
            largest = max(site.ratio for site in report.sites)
            found[f"{dtype} largest sound ratio"] = max(
                largest, found.get(f"{dtype} largest sound ratio", 0.0)
            )
            if report.verdict != "healthy":
                print(f"{dtype} {name}: accused: {named(report)}", file=sys.stderr)
        found[dtype] = {"faults": len(FAULTS)} | dict(counts)
    print("\n".join(f"{name}: {facts}" for name, facts in found.items()))


def make_rows(lengths: tuple[int, ...], vocabulary_size: int = 103) -> list[Row]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(5, vocabulary_size, (length,), generator=generator) for length in lengths]
    return [Row(ids.tolist()) for ids in drawn]


def report_of(fault: Fault, dtype: torch.dtype, rows: list[Row]) -> LayersReport:
    """Compare an engine that has the fault with the reference."""
    model, engine = fault.sides(dtype)
    inner = engine.get_base_model() if fault.adapter else engine
    set_attention(inner, own_attention(inner))
    with fault.running():
        values = observe(fault.name, engine, own_forward(engine), rows)
    return compare_layers(reference_of(model), values, rows)


def outcome(fault: Fault, report: LayersReport) -> str:
    """Return "right", "wrong layer", "wrong operator" or "missed"."""
    first = report.first
    if first is None:
        return "missed"
    if first.site.layer != fault.layer:
        return "wrong layer"
    return "right" if first.operator == fault.operator else "wrong operator"


def named(report: LayersReport) -> str:
    """Return the first site and its ratio, and the largest ratio."""
    if report.first is None:
        return f"largest ratio {max(site.ratio for site in report.sites):.2f}"
    return f"layer {report.first.site.layer}, {report.first.operator}, ratio {report.first.ratio:.3g}"


def sound_pairs(dtype: torch.dtype, rows: list[Row]) -> Iterator[tuple[str, LayersReport]]:
    for family in FAMILIES:
        model = make_model(family, dtype)
        reference = reference_of(model)
        engine = make_model(family, dtype)
        for attention in {"eager", own_attention(engine)}:
            set_attention(engine, attention)
            for prefill, step in ((1.0, 1), (0.5, 1), (0.3, 7)):
                name = f"{family}, {attention}, {prefill} of a row as prompt, then {step}"
                values = observe(name, engine, own_forward(engine), rows, prefill=prefill, step=step)
                yield name, compare_layers(reference, values, rows)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            yield (
                f"{family}, embedded engine",
                compare_layers(reference, embedded(folder, dtype, rows), rows),
            )


if __name__ == "__main__":
    main()
