"""Speed of `record import`, beside its JSON parser alone and beside Python's.

    python benchmarks/import_speed.py [--samples 64] [--mean-tokens 1500] [--rounds 5]

The source is a step of NeMo-RL's JSON lines with log-probs and advantages as a trainer prints them,
17 digits each. An import reads it, writes the record and its checksums. Everything is CPU seconds,
children included; ways take turns, and a ratio is the median of those of one round.
"""

import argparse
import json
import resource
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from recorder.trainers.importing import import_record

COLUMNS = ("generation_logprobs", "prev_logprobs", "advantages")


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return the CPU seconds of one run, those of its finished children included."""
    begin = cpu_used()
    work()
    return cpu_used() - begin


def cpu_used() -> float:
    """Return the CPU seconds that this process and its finished children have used."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def write_source(file: Path, num_samples: int, mean_tokens: int) -> int:
    """Write one step without padding; return its size in bytes."""
    rng = np.random.default_rng(0)
    with file.open("w") as lines:
        for sample in range(num_samples):
            length = int(rng.integers(mean_tokens // 2, mean_tokens * 3 // 2))
            columns = {name: [(-rng.exponential(0.5, length)).tolist()] for name in COLUMNS}
            row = {
                "content": [f"prompt {sample // 4}", "completion"],
                "rewards": [float(rng.integers(0, 2))],
                "input_lengths": [length],
                "token_ids": [rng.integers(0, 150_000, length).tolist()],
                "token_loss_mask": [(np.arange(length) >= length // 4).astype(int).tolist()],
            }
            lines.write(json.dumps(row | columns) + "\n")
    return file.stat().st_size


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--mean-tokens", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "train_data_step1.jsonl"
        size_bytes = write_source(source, options.samples, options.mean_tokens)
        record = Path(scratch) / "record"
        lines = source.read_bytes().splitlines()
        ways: dict[str, Callable[[], object]] = {
            "json": lambda: [json.loads(line) for line in lines],
            "msgspec": lambda: [msgspec.json.decode(line) for line in lines],
            "record import": lambda: import_record(source, record, overwrite=True),
        }
        rounds = [{way: cpu_seconds(run) for way, run in ways.items()} for _ in range(options.rounds)]
    print(f"{size_bytes / 1e6:.1f} MB of JSON lines, {options.samples} samples")
    for way in ways:
        rate = size_bytes / 1e6 / statistics.median(one[way] for one in rounds)
        ratios = sorted(one[way] / one["json"] for one in rounds)
        print(
            f"{way:<14}{rate:>7.0f} MB a CPU second, {statistics.median(ratios):.2f} of the time of json "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )


if __name__ == "__main__":
    main()
