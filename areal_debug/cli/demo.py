"""`areal-debug demo`: the whole journey on a tiny model: teach, train with reward, record, replay to the same bits."""

import os
import shlex
import sys
import threading
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from areal_debug.render import console, errors_as_sentences, fail, sparkline

DEMO = Path(__file__).parents[1] / "demo"


@click.command()
@click.option(
    "--output", type=click.Path(path_type=Path), help="New folder for everything; by default below runs/."
)
@click.option("--steps", type=click.IntRange(min=1), default=30, show_default=True, help="GRPO steps.")
@click.option("--nproc", type=click.IntRange(min=1), default=2, show_default=True, help="FSDP2 ranks.")
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of everything random.")
@errors_as_sentences
def command(output: Path | None, steps: int, nproc: int, seed: int) -> None:
    """Teach a tiny model to add, train it by GRPO while every step is recorded, and replay the record bit for bit."""
    from areal_debug.cli.train import read_config
    from areal_debug.replay_output import print_verdict
    from areal_debug.replay_ranks import replay_on_ranks
    from replayer.request import Request

    output = new_folder(output)
    out = console()
    options = [
        *("--config", str(DEMO / "grpo.yaml")),
        *(f"cluster.fileroot={output}/runs", f"seed={seed}", f"total_train_steps={steps}"),
        *(f"actor.path={output}/model", f"allocation_mode=embedded|fsdp:d{nproc}"),
    ]
    read_config(options)  # what is wrong with them is told before anything starts
    out.print("[bold]1. A tiny model learns to add from examples, until it is right sometimes.[/bold]")
    teach(out, output, seed)
    out.print(f"\n[bold]2. It learns from reward: GRPO on {nproc} FSDP2 ranks, every step recorded.[/bold]")
    run_bar(
        out,
        "GRPO",
        "grpo.py",
        [*options, "--dump-rollout", str(output / "record")],
        nproc,
        output,
        "grpo",
        steps,
    )
    show_rewards(out, stats_file(output, "grpo"))
    out.print("\n[bold]3. The record is replayed: no engine, no sampling, the same bits.[/bold]")
    report = replay_on_ranks(Request(str(output / "record"), 0, steps - 1), nproc)
    print_verdict(out, report)
    print_next(out, output, steps)
    raise SystemExit(0 if report.identical else 1)


def new_folder(output: Path | None) -> Path:
    """The folder asked for, which must be new or empty, or the next free one below runs/.

    Raises:
        ValueError: the folder holds something.
    """
    if output is None:
        names = (Path("runs") / (f"demo-{n}" if n > 1 else "demo") for n in range(1, 10_000))
        output = next(path for path in names if not path.exists())
    elif output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} is not empty: give a new folder with --output, or remove it")
    return output.resolve()


def teach(out: Console, output: Path, seed: int) -> None:
    """Make the model and fine-tune it on examples; it ends in `output/model`."""
    arguments = ["--config", str(DEMO / "sft.yaml"), f"cluster.fileroot={output}/runs", f"seed={seed}"]
    run_bar(
        out, "SFT", "sft.py", [*arguments, f"actor.path={output}/model-untrained"], 1, output, "sft", None
    )
    trained = next((output / "runs" / "checkpoints").glob("*/demo/sft/default/final"))
    trained.rename(output / "model")


def run_bar(
    out: Console,
    title: str,
    script: str,
    arguments: list[str],
    num_ranks: int,
    output: Path,
    trial: str,
    total: int | None,
) -> None:
    """Run a script of the demo on its ranks, under a bar that counts the lines of its statistics."""
    from areal_core.environment import DETERMINISTIC
    from areal_core.launch.torchrun import run_ranks

    ended = threading.Event()
    columns = (
        TextColumn("   {task.description}"),
        BarColumn(),
        TextColumn("{task.completed} steps"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=out, transient=True) as progress:
        task = progress.add_task(f"{title}: starting {num_ranks} process{'es' * (num_ranks > 1)}", total=None)

        def follow() -> None:
            while not ended.wait(0.2):
                if steps := count_steps(output, trial):
                    progress.update(task, description=title, completed=steps, total=total)

        follower = threading.Thread(target=follow)
        follower.start()
        try:
            command = ["-m", "areal_debug.script", str(DEMO / script), *arguments]
            code = run_ranks(command, num_ranks, DETERMINISTIC, output / "logs" / trial, echo=False)
        finally:
            ended.set()
            follower.join()
    log = output / "logs" / trial / "trainer.log"
    if code != 0:
        fail(
            "\n".join(
                [
                    f"{title} ended with exit code {code}; the end of {log}:",
                    *log.read_text().splitlines()[-15:],
                ]
            ),
            code,
        )
    out.print(f"   {title}: {count_steps(output, trial)} steps")


def stats_file(output: Path, trial: str) -> Path | None:
    """The statistics of a run of the demo, once they exist."""
    return next((output / "runs" / "logs").glob(f"*/demo/{trial}/stats.jsonl"), None)


def count_steps(output: Path, trial: str) -> int:
    """Steps that a run has finished."""
    file = stats_file(output, trial)
    return file.read_text().count("\n") if file else 0


def show_rewards(out: Console, file: Path | None) -> None:
    """The mean reward of every step as a line of bars."""
    from areal_core.telemetry.loggers import read_stats

    assert file is not None
    rewards = [line["ppo_actor/task_reward/avg"] for line in read_stats(file)]
    out.print(f"   reward {rewards[0]:.2f} [cyan]{sparkline(rewards)}[/cyan] {rewards[-1]:.2f}")


def print_next(out: Console, output: Path, steps: int) -> None:
    """Where everything is, and what to try."""
    shown = os.path.relpath(output)
    shown = str(output) if shown.startswith("..") else shown
    record = shlex.quote(f"{shown}/record")
    command = sys.argv[0] if sys.argv[0].startswith(".") else "areal-debug"  # as it was called
    out.print(f"\n[bold]Files:[/bold] {shown}")
    out.print("[bold]Try next:[/bold]")
    out.print(
        f"   {command} record show {record} --step {steps - 1}", "# every token, coloured by its logprob"
    )
    out.print(
        f"   {command} replay {record} --to-step {min(2, steps - 1)} --json", "# the comparison as JSON"
    )
    out.print(f"   {command} record verify {record}", "# every byte against its checksum")
