"""`areal-debug demo`: SFT, GRPO, record and bit-identical replay of a tiny model."""

import os
import shlex
import shutil
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from areal_debug.cli import Verb, force_option, json_option, output_option
from areal_debug.render import console, fail, is_quiet, print_log_end, refuse_existing, sparkline, styled
from areal_debug.waiting import doing, tick

if TYPE_CHECKING:
    from areal_core.launch.warm import WarmRanks

DEMO = Path(__file__).parents[1] / "demo"
OUTPUTS = {"runs", "logs", "model-untrained", "model", "record"}


@click.command(cls=Verb, example="areal-debug demo -o runs/demo --steps 10")
@output_option("New folder for everything; by default a new one below runs/.")
@force_option
@click.option("--steps", type=click.IntRange(min=1), default=30, show_default=True, help="GRPO steps.")
@click.option("--nproc", type=click.IntRange(min=1), default=2, show_default=True, help="FSDP2 ranks.")
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of all random numbers.")
@json_option
def command(output: Path | None, force: bool, steps: int, nproc: int, seed: int, as_json: bool) -> None:
    """Fine-tune a tiny model to add, train it by GRPO with every step recorded, and replay the
    record bit for bit.
    """
    from areal_debug.replay.ranks import replay_on_ranks, replay_ranks
    from areal_debug.replay.report import report_of
    from areal_debug.report.terminal import print_answer
    from areal_debug.train.script_options import read_config
    from replayer.request import Request

    output = new_folder(output, force)
    hidden = as_json or is_quiet()
    out = Console(quiet=True) if hidden else console()
    options = [
        *("--config", str(DEMO / "grpo.yaml")),
        *(f"cluster.fileroot={output}/runs", f"seed={seed}", f"total_train_steps={steps}"),
        *(f"actor.path={output}/model", f"allocation_mode=embedded|fsdp:d{nproc}"),
    ]
    read_config(options)  # fails fast, before any process starts
    out.print(
        styled("[bold]1. SFT: a tiny model learns to add from examples, until some answers are right.[/bold]")
    )
    with replay_ranks() as ranks:
        fine_tune(ranks, out, output, seed)
        out.print(styled("\n[bold]2. GRPO on {} FSDP2 ranks, every step recorded.[/bold]", nproc))
        recorded = ["--dump-rollout", str(output / "record")]
        run_bar(ranks, out, "GRPO", "grpo.py", [*options, *recorded], nproc, output, "grpo", steps)
        show_rewards(out, stats_file(output, "grpo"))
    out.print(styled("\n[bold]3. The record is replayed: no engine, no sampling, the same bits.[/bold]"))
    request = Request(str(output / "record"), 0, steps - 1)
    with replay_ranks() as ranks:  # forks of the process that trained would prove less
        report = replay_on_ranks(ranks, request, nproc, hidden)
    print_answer({"output": str(output), "replay": report.to_dict()}, report_of(report, request), as_json)
    if not as_json:
        print_next(out, output, steps)
    raise SystemExit(0 if report.identical else 1)


def new_folder(output: Path | None, force: bool) -> Path:
    """Return the requested folder, or the next free one below runs/.

    With `force`, remove an earlier demo from it.

    Raises:
        ValueError: the folder has content, or with `force`, content that is not of a demo.
    """
    if output is None:
        names = (Path("runs") / (f"demo-{n}" if n > 1 else "demo") for n in range(1, 10_000))
        output = next(path for path in names if not path.exists())
    else:
        refuse_existing(output, force)
        present = {path.name for path in output.iterdir()} if output.exists() else set()
        if foreign := sorted(present - OUTPUTS):
            raise ValueError(
                f"{output} holds {foreign[0]}, which no demo wrote: give a new folder with --output"
            )
        for name in present:
            shutil.rmtree(output / name)
    return output.resolve()


def fine_tune(ranks: "WarmRanks", out: Console, output: Path, seed: int) -> None:
    arguments = ["--config", str(DEMO / "sft.yaml"), f"cluster.fileroot={output}/runs", f"seed={seed}"]
    arguments.append(f"actor.path={output}/model-untrained")
    run_bar(ranks, out, "SFT", "sft.py", arguments, 1, output, "sft", None)
    trained = next((output / "runs" / "checkpoints").glob("*/demo/sft/default/final"))
    trained.rename(output / "model")


def run_bar(
    ranks: "WarmRanks",
    out: Console,
    title: str,
    script: str,
    arguments: list[str],
    num_ranks: int,
    output: Path,
    trial: str,
    total: int | None,
) -> None:
    ended = threading.Event()
    log = output / "logs" / trial / "trainer.log"

    def follow() -> None:
        done = 0
        while not ended.wait(0.2):
            now = count_steps(output, trial)
            tick(now - done)
            done = now

    with doing(title, total or 0):
        follower = threading.Thread(target=follow, daemon=True)  # an interrupt may come before `try`
        follower.start()
        try:
            command = ["-m", "areal_debug.train.script", str(DEMO / script), *arguments]
            code = ranks.run(command, num_ranks, {}, log, echo=False)
        finally:
            ended.set()
            follower.join()
    if code != 0:
        print_log_end(log)
        fail(f"{title} ended with exit code {code}; the end of {log} is above", code)
    out.print(styled("   {}: {} steps", title, count_steps(output, trial)))


def stats_file(output: Path, trial: str) -> Path | None:
    return next((output / "runs" / "logs").glob(f"*/demo/{trial}/stats.jsonl"), None)


def count_steps(output: Path, trial: str) -> int:
    """Return the number of steps that a run has finished."""
    file = stats_file(output, trial)
    return file.read_text().count("\n") if file else 0


def show_rewards(out: Console, file: Path | None) -> None:
    from areal_core.telemetry.loggers import read_stats

    assert file is not None
    rewards = [line["ppo_actor/task_reward/avg"] for line in read_stats(file)]
    out.print(styled("   reward {:.2f} [cyan]{}[/cyan] {:.2f}", rewards[0], sparkline(rewards), rewards[-1]))


def print_next(out: Console, output: Path, steps: int) -> None:
    shown = os.path.relpath(output)
    shown = str(output) if shown.startswith("..") else shown
    record = shlex.quote(f"{shown}/record")
    command = sys.argv[0] if sys.argv[0].startswith(".") else "areal-debug"  # as it was called
    out.print(styled("\n[bold]Files:[/bold] {}", shown))
    out.print(styled("[bold]Try next:[/bold]"))
    out.print(
        styled("   {} record show {} --step {}", command, record, steps - 1),
        "# every token, coloured by its logprob",
    )
    out.print(
        styled("   {} replay {} --to-step {} --json", command, record, min(2, steps - 1)),
        "# the comparison as JSON",
    )
    out.print(styled("   {} record verify {}", command, record), "# every byte against its checksum")
