"""25 bad samples, planted in a recorded step, each shrunk to its rows and replayed elsewhere.

    python benchmarks/shrink.py --work /tmp/shrink [--only NAME ...]

A tiny model is trained for three steps. For each plant its last step is trained again with 128 rows
of which one or two are bad (`--edit` of `areal-debug replay`: this file), and recorded. Then

    areal-debug record cut PLANT --step 2 --shrink EXPR --to bug.zip

must leave at most two rows in less than two minutes, and `areal-debug replay bug.zip` must give the
same bits in another folder with another HOME and another temporary folder, with record and model
moved away. Exit code 1 if a plant fails.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
VARIABLE = "SHRINK_PLANT"  # the plant that `edit` makes
STEP, ROW, OTHER = 2, 37, 39  # the step, and the bad rows: both of prompt 36, samples 5 and 7
MOST_ROWS, MOST_S, MOST_BYTES = 2, 120.0, 5_000_000
Batch = dict[str, Any]


@dataclass(frozen=True)
class Plant:
    """A bad sample.

    Attributes:
        symptom: of `--shrink`. edit: changes the batch in place. options: of the run.
        has_outcome: False if no run can record the step, because it ends with an error.
    """

    symptom: str
    edit: Callable[[Batch], None]
    options: tuple[str, ...] = ()
    has_outcome: bool = True


def put(
    key: str, value: float, row: int = ROW, completion_token: int | None = None
) -> Callable[[Batch], None]:
    """Return an edit that sets a number of a row, or of one of its tokens in the loss mask."""

    def edit(batch: Batch) -> None:
        if completion_token is None:
            batch[key][row] = value
        else:
            batch[key][row, batch["loss_mask"][row].nonzero()[completion_token]] = value

    return edit


def of_all(*edits: Callable[[Batch], None]) -> Callable[[Batch], None]:
    """Return an edit that makes several."""

    def edit(batch: Batch) -> None:
        for one in edits:
            one(batch)

    return edit


def quiet(batch: Batch) -> None:
    """Give all rows the same reward: no row has an advantage."""
    batch["rewards"].zero_()


def without_completion(batch: Batch) -> None:
    """Leave a row its prompt alone."""
    first = int(batch["loss_mask"][ROW].nonzero()[0])
    for tensor in batch.values():
        if tensor.dim() == 2:
            tensor[ROW, first:] = 0


def all_logprobs(value: float) -> Callable[[Batch], None]:
    """Return an edit that sets every log-prob of a row."""

    def edit(batch: Batch) -> None:
        batch["logprobs"][ROW][batch["loss_mask"][ROW].bool()] = value

    return edit


def prompt_in_mask(batch: Batch) -> None:
    """Put the prompt of a row into its loss mask: its log-probs are 0, which no engine gave."""
    first = int(batch["loss_mask"][ROW].nonzero()[0])
    batch["loss_mask"][ROW, 1:first] = 1
    batch["versions"][ROW, 1:first] = 2


def equal_rewards(batch: Batch) -> None:
    """Give a group rewards whose mean is rounded: its standard deviation should be 0."""
    quiet(batch)
    batch["rewards"][batch["prompt_id"] == batch["prompt_id"][ROW]] = 0.1
    batch["rewards"][ROW] = 0.1 + 1e-8


NO_NORM = ("actor.reward_norm=null", "actor.adv_norm=null")
GROUP_NORM = ("actor.adv_norm=null",)
NOT_CLIPPED = ("actor.reward_clip=3.4e38",)
nan, inf = float("nan"), float("inf")
PLANTS = {
    "nan-logprob": Plant("loss is nan", put("logprobs", nan, completion_token=3)),
    "nan-logprob-twice": Plant(
        "loss is nan", of_all(put("logprobs", nan, 90, 0), put("logprobs", nan, 3, 2))
    ),
    "infinite-logprob": Plant("grad_norm is not finite", put("logprobs", -inf, completion_token=1)),
    "tiny-logprob": Plant(
        'stats["importance_weight/max"] is inf', put("logprobs", -200.0, completion_token=5)
    ),
    "positive-logprob": Plant(
        'stats["importance_weight/min"] < 0.001', put("logprobs", 5.0, completion_token=2)
    ),
    "other-policy": Plant('stats["update/approx_kl/min"] < -3', all_logprobs(-1.0)),
    "first-token": Plant("loss is not finite", put("logprobs", nan, completion_token=0)),
    "last-token": Plant("loss is not finite", put("logprobs", nan, completion_token=-1)),
    "nan-reward": Plant("advantages is nan", put("rewards", nan), GROUP_NORM),
    "nan-reward-in-batch-norm": Plant("grad_norm is nan", put("rewards", nan)),
    "infinite-reward": Plant("advantages is inf", put("rewards", inf), (*NO_NORM, "actor.reward_clip=.inf")),
    "huge-reward": Plant("grad_norm > 100", put("rewards", 1e6), (*NO_NORM, *NOT_CLIPPED)),
    "huge-negative-reward": Plant(
        "min(row_losses) < -1000 or max(row_losses) > 1000", put("rewards", -1e6), (*NO_NORM, *NOT_CLIPPED)
    ),
    "kl-to-reference": Plant(
        'stats["kl_rewards/min"] < -0.3', all_logprobs(-1.0), ("ref.path={model}", "actor.kl_ctl=0.1")
    ),
    "loss-overflow-bfloat16": Plant(
        "loss is inf",
        of_all(put("rewards", -3.3e38), all_logprobs(-8.0)),
        (*NO_NORM, *NOT_CLIPPED, "actor.dtype=bfloat16"),
    ),
    "gradient-overflow": Plant("grad_norm is not finite", put("rewards", 1e37), (*NO_NORM, *NOT_CLIPPED)),
    "pair-in-group-norm": Plant("grad_norm > 0", of_all(quiet, put("rewards", 1.0)), GROUP_NORM),
    "pair-in-batch-norm": Plant(
        "max(advantages) > 0.5", of_all(quiet, put("rewards", 1.0)), ("actor.reward_norm=null",)
    ),
    "two-bad-of-one-group": Plant(
        "max(advantages) - min(advantages) > 1.4",
        of_all(quiet, put("rewards", 1e4), put("rewards", -1e4, OTHER)),
        (*GROUP_NORM, *NOT_CLIPPED),
    ),
    "rewards-nearly-equal": Plant(
        "max(advantages) > 0.5", equal_rewards, (*GROUP_NORM, "actor.reward_norm.eps=1e-12")
    ),
    "no-completion": Plant("min(lengths) == 0", without_completion, ("actor.ppo_n_minibatches=1",)),
    "prompt-in-loss-mask": Plant('stats["importance_weight/min"] < 0.05', prompt_in_mask),
    "future-version": Plant(
        'stats["sample_staleness_theta/min"] < 0', put("versions", 9, completion_token=4)
    ),
    "token-outside-vocabulary": Plant(
        '"Index" in error', put("input_ids", 5000, completion_token=2), has_outcome=False
    ),
    "prompt-outside-vocabulary": Plant(
        'error != ""', lambda batch: batch["input_ids"][ROW].__setitem__(1, 70000), has_outcome=False
    ),
}


def edit(batch: Batch, step: int) -> Batch:
    """Plant a bad sample; the function that `areal-debug replay --edit` calls."""
    if step == STEP:
        batch["rewards"] = (batch["sample_id"] % 3 == 0).to(batch["rewards"].dtype)
        PLANTS[os.environ[VARIABLE]].edit(batch)
    return batch


@dataclass(frozen=True)
class Result:
    """What became of a plant: rows and tokens before and after, runs of the step, seconds, bytes.

    `same_bits`: of the replay elsewhere; of a step that ends with an error, that it does so again.
    """

    name: str
    rows: tuple[int, int]
    tokens: tuple[int, int]
    num_runs: int
    seconds: float
    size_bytes: int
    same_bits: bool

    @property
    def is_good(self) -> bool:
        """Return whether the plant met every bound."""
        return (
            self.rows[1] <= MOST_ROWS
            and self.seconds < MOST_S
            and self.size_bytes <= MOST_BYTES
            and self.same_bits
        )


def call(*arguments: object, cwd: Path, ends_with: int = 0, **environment: str) -> str:
    """Run the command line and return its output. Raises RuntimeError for another exit code."""
    command = [sys.executable, "-m", "areal_debug", *map(str, arguments)]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True)
    if done.returncode != ends_with:
        raise RuntimeError(f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr if ends_with else done.stdout


def make_base(work: Path) -> None:
    """Train and record three steps of 128 rows, with an anchor before the last."""
    from areal_core.testing import make_tiny_model

    make_tiny_model(work / "model")
    demo = ROOT / "areal_debug" / "demo"
    options = {
        "allocation_mode": "embedded|fsdp:d1",
        "total_train_steps": 3,
        "actor.path": work / "model",
        "cluster.fileroot": work / "runs",
        "gconfig.max_new_tokens": 16,
        "actor.mb_spec.max_tokens_per_mb": 2048,
        "train_dataset.batch_size": 16,
        "rollout.consumer_batch_size": 16,
        "debug.anchor_every_steps": STEP,
    }
    settings = [f"{name}={value}" for name, value in options.items()]
    call(
        "train",
        demo / "grpo.py",
        "--config",
        demo / "grpo.yaml",
        *settings,
        "--dump-rollout",
        work / "base",
        cwd=work,
    )


def make_plant(work: Path, name: str) -> Path:
    """Record the step with a bad sample; return the record."""
    plant, folder = PLANTS[name], work / "planted"
    if not plant.has_outcome:
        return write_rollouts(work, name)
    options = [option.format(model=work / "model") for option in plant.options]
    arguments = ("replay", work / "base", "--from-step", STEP, "--edit", __file__, "-o", folder, *options)
    call(*arguments, cwd=work, **{VARIABLE: name})
    return folder


def write_rollouts(work: Path, name: str) -> Path:
    """Write the rows of a step that no run can finish: a record of rollouts alone, of step 0."""
    from dataclasses import replace

    from recorder import Recording, open_record
    from recorder.format import STEPS_FOLDER, step_name
    from recorder.header import write_header
    from recorder.step_files import RankStep, commit_step, write_rank
    from recorder.tensors import flatten
    from replayer.source import recorded_batch

    os.environ[VARIABLE] = name
    base, folder = open_record(work / "base"), work / "planted"
    batch = edit(recorded_batch(base.step(STEP), 0), STEP)
    place = folder / STEPS_FOLDER / step_name(0)
    place.mkdir(parents=True)
    write_header(folder, replace(base.header, recording=Recording("rollout")))
    commit_step(place, 0, 1, [write_rank(place, 0, 1, RankStep(0, 1, flatten(batch)))], None)
    return folder


def try_plant(work: Path, name: str) -> Result:
    """Plant a bad sample, shrink its step, and replay the file elsewhere."""
    record, bug, elsewhere = make_plant(work, name), work / f"{name}.zip", work / f"elsewhere-{name}"
    step = STEP if PLANTS[name].has_outcome else 0
    begin_s = time.monotonic()
    arguments = ("record", "cut", record, "--step", step, "--shrink", PLANTS[name].symptom, "--to", bug)
    report = json.loads(call(*arguments, "--no-check", "--json", cwd=work))
    seconds = time.monotonic() - begin_s
    for folder in ("home", "tmp", "files"):
        (elsewhere / folder).mkdir(parents=True)
    bug.rename(elsewhere / "files" / "bug.zip")
    away = {work / folder: work / f"moved-{folder}" for folder in ("base", "planted", "model", "runs")}
    for place, other in away.items():
        place.rename(other)
    try:
        same_bits = replays(elsewhere, report["cut"]["error"])
    finally:
        for place, other in away.items():
            other.rename(place)
    (work / "planted").rename(elsewhere / "planted")
    rows, tokens = (report["cut"][f"num_{of}"] for of in ("rows", "tokens"))
    return Result(
        name,
        (rows, report["rows"]),
        (tokens, report["tokens"]),
        report["num_runs"],
        seconds,
        report["size_bytes"],
        same_bits,
    )


def replays(elsewhere: Path, error: str | None) -> bool:
    """Return whether a file gives the same bits, or the same error, in a folder of its own."""
    environment = {"HOME": str(elsewhere / "home"), "TMPDIR": str(elsewhere / "tmp")}
    if error is not None:
        output = call("replay", "bug.zip", cwd=elsewhere / "files", ends_with=1, **environment)
        return error in " ".join(output.split())
    report = json.loads(call("replay", "bug.zip", "--json", cwd=elsewhere / "files", **environment))
    return report["identical"] and report["guarantee"]["kind"] == "bitwise"


def main() -> int:
    """Try the plants and print the table; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="new folder for everything")
    parser.add_argument("--only", nargs="*", choices=PLANTS, default=list(PLANTS), metavar="NAME")
    options = parser.parse_args()
    options.work.mkdir(parents=True)
    work = options.work.resolve()
    make_base(work)
    print(f"{'plant':<26} {'rows':>9} {'tokens':>11} {'runs':>5} {'seconds':>8} {'MB':>6}  elsewhere")
    results = []
    for name in options.only:
        result = try_plant(work, name)
        results.append(result)
        rows, tokens = (f"{before:,} > {after}" for before, after in (result.rows, result.tokens))
        bits = "same bits" if PLANTS[name].has_outcome else "same error"
        print(
            f"{name:<26} {rows:>9} {tokens:>11} {result.num_runs:>5} {result.seconds:>8.1f} "
            f"{result.size_bytes / 1e6:>6.2f}  {bits if result.same_bits else 'DIFFERENT'}"
            f"{'' if result.is_good else '  FAILED'}",
            flush=True,
        )
    good = sum(result.is_good for result in results)
    print(
        f"{good} of {len(results)}: at most {MOST_ROWS} rows, {MOST_S:g} s, {MOST_BYTES / 1e6:g} MB, same bits elsewhere"
    )
    return 0 if good == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
