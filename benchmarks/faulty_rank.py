"""How often `replay --find-faulty` names rank and tensor of a flipped bit, and accuses nobody else.

    python -m benchmarks.faulty_rank [--flips 100] [--noisy 30] [--sound 30] [--other 10]

Each case is a recorded run of two steps on 2 or 4 gloo ranks and its replays: a random bit of a
random matrix product, gradient, sent gradient or optimizer state on one rank; rounding that differs
in each run, replays included; nothing; other kernels of torch and MKL. Exits with 1 when a flip
that changes a recorded number is misjudged in more than one of twenty, noise is called corruption,
or a sound run is accused.
"""

import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from areal_core.environment import DETERMINISTIC
from areal_core.launch.warm import WarmRanks, warm_ranks
from areal_core.testing import make_tiny_model
from areal_core.testing.bit_flips import Flip
from areal_debug.replay.ranks import MODULES, Runner, runner
from benchmarks.harness import ROOT, read_options, report_rate
from recorder import Record, open_record
from replayer.faulty import FaultyReport, find_faulty

OTHER_KERNELS = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}
PARTS = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
PLACES = {"output": "output of {}", "gradient": "gradient of {}.weight", "state": "updated weight {}.weight",
          "sent": "sent gradient of {}"}  # fmt: skip
EXPECTED = {"noise": "nondeterminism", "sound": "sound", "other": "environment"}
NOISE = (1.0, 0.1, 0.02)  # shares of matrix products


@dataclass(frozen=True)
class Case:
    """A run: its ranks and what is planted in it."""

    name: str
    num_ranks: int
    flip: Flip | None = None
    noise: float = 0.0


def cases(flips: int, noisy: int, sound: int, other: int) -> Iterator[Case]:
    """Yield the cases, the same ones each time."""
    chosen = random.Random(0)
    for number in range(flips):
        num_ranks = (2, 4)[number % 2]
        kind = tuple(PLACES)[number // 2 % len(PLACES)]
        module = f"model.layers.{chosen.randrange(2)}.{chosen.choice(PARTS)}"
        yield Case(
            "flip",
            num_ranks,
            Flip(
                kind,  # type: ignore[arg-type]
                step=1,
                rank=chosen.randrange(num_ranks),
                module="" if kind == "sent" else module,
                call=chosen.randrange(2),
                element=chosen.randrange(10_000),
                bit=chosen.randrange(32),
            ),
        )
    for name, count in (("noise", noisy), ("sound", sound), ("other", other)):
        for number in range(count):
            noise = NOISE[number // 2 % len(NOISE)] if name == "noise" else 0.0
            yield Case(name, (2, 4)[number % 2], noise=noise)


def record(case: Case, ranks: WarmRanks, model: Path, folder: Path, with_sums: bool) -> Record:
    folder = Path(tempfile.mkdtemp(dir=folder))
    changes: dict[str, Any] = {"debug.dump_rollout_data": True, "debug.path": str(folder / "record")}
    changes |= {"debug.dump_scope": "full", "debug.record_bit_sums": True} if with_sums else {}
    flips = [] if case.flip is None else [asdict(case.flip)]
    asked = {
        "folder": str(folder),
        "model": str(model),
        "flips": flips,
        "changes": changes,
        "noise": case.noise,
    }
    program = [str(ROOT / "benchmarks/faulty_run.py"), json.dumps(asked)]
    if ranks.run(program, case.num_ranks, {}, folder / "log", echo=False, place=ROOT):
        sys.exit(f"{case} failed:\n{(folder / 'log').read_text()[-3000:]}")
    return open_record(folder / "record")


def judge(case: Case, report: FaultyReport) -> str:
    """Return what became of a case: "right", "wrong", or what is worth a number of its own."""
    if case.flip is None:
        if report.kind == "corruption":
            return "accused"
        return "right" if report.kind == EXPECTED[case.name] else f"called {report.kind}"
    if report.kind == "sound":
        return "changes nothing"
    if report.kind == "unclear":
        return "not said"
    if (report.kind, report.rank) != ("corruption", case.flip.rank) or report.place is None:
        return "wrong"
    wanted = PLACES[case.flip.kind].format(case.flip.module)
    return "right" if report.place.what.startswith(wanted) else "rank only"


def measure(
    options: Any, run: Runner, others: WarmRanks, model: Path, folder: Path
) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for case in cases(options.flips, options.noisy, options.sound, options.other):
        ranks = others if case.name == "other" else run.ranks
        recorded = record(case, ranks, model, folder, options.record == "sums")

        def again(number: int, case: Case = case, recorded: Record = recorded) -> Record | None:
            if case.noise:  # a replay that is as noisy: the same rows, the same program
                return record(case, run.ranks, model, folder, options.record == "sums")
            return run.replay(recorded, 0, 1)

        report = find_faulty(recorded, again, recorded.steps)
        became = judge(case, report)
        found[case.name, became] += 1
        if became not in ("right", "changes nothing"):
            print(case, "->", report.kind, report.rank, report.place, flush=True)
    return found


def main(text: str) -> None:
    options = read_options(text, flips=100, noisy=30, sound=30, other=10, record=("sums", "plan"))
    with tempfile.TemporaryDirectory() as name, runner(None) as run, ExitStack() as cleanup:
        folder = Path(name)
        model = make_tiny_model(folder / "model")
        others = cleanup.enter_context(warm_ranks(DETERMINISTIC | OTHER_KERNELS, MODULES))
        found = measure(options, run, others, model, folder)
    for (kind, became), count in sorted(found.items()):
        print(f"{kind:<6} {became:<16} {count}")
    sound = options.noisy + options.sound + options.other
    accused = sum(count for (_, became), count in found.items() if became == "accused")
    right, changing = found["flip", "right"], options.flips - found["flip", "changes nothing"]
    what = "rank and tensor of a flipped bit"
    report_rate(what, "replay --find-faulty", (right, changing), (accused, sound))
    sys.exit(int((options.record == "sums" and right < 0.95 * changing) or accused > 0))


if __name__ == "__main__":
    main(__doc__ or "")
