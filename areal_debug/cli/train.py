"""`areal-debug train`: a training script on all its ranks and servers, recorded or replayed on request."""

import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from areal_debug.render import errors_as_sentences, fail

if TYPE_CHECKING:
    from areal_core.config import PPOConfig


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("script")
@click.option(
    "--config", "config_file", type=click.Path(), help="YAML file; by default the one beside the script."
)
@click.option(
    "--dump-rollout", is_flag=False, flag_value="", metavar="[DIR]", help="Record every step (into DIR)."
)
@click.option("--replay-rollout", metavar="DIR", help="Train from a record, without an inference engine.")
@click.option(
    "--watch", is_flag=True, help="Stand beside the run, and say why it hangs before anything kills it."
)
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
@errors_as_sentences
def command(
    script: str,
    config_file: str | None,
    dump_rollout: str | None,
    replay_rollout: str | None,
    watch: bool,
    overrides: tuple[str, ...],
) -> None:
    """Run SCRIPT (a file, or the name of an example) on its ranks and servers.

    OVERRIDES change options of the config: actor.optimizer.lr=1e-5.
    """
    from areal_core.allocation import resolve_allocation
    from areal_core.launch.local import launch
    from areal_core.paths import run_folder
    from areal_debug.flags import flag_overrides
    from areal_debug.report_file import REPORT_FILE, read_report

    path = find_script(script)
    flags: list[str] = []
    if dump_rollout is not None:
        flags += flag_overrides("--dump-rollout", dump_rollout)
    if replay_rollout is not None:
        flags += flag_overrides("--replay-rollout", replay_rollout)
    arguments = ["--config", config_file or str(path.with_suffix(".yaml")), *flags, *overrides]
    config = read_config(arguments)
    allocation = resolve_allocation(config)
    if allocation.train is not None:
        check_record(config, allocation.train.world_size)
    elif config.debug.dump_rollout_data or config.debug.replay_rollout_data:
        fail(
            "the allocation has no training part, so there is nothing to record or replay: add one, as in 'sglang:d1+fsdp:d2'"
        )
    if watch:
        raise SystemExit(watch_run(run_folder(config, "logs")))
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        code = launch(
            ["-m", "areal_debug.script", str(path), *arguments],
            config,
            allocation,
            {REPORT_FILE: str(report)},
            log_dir=run_folder(config, "logs"),
            with_servers=not config.debug.replay_rollout_data,
        )
        if code == 0 and config.debug.replay_rollout_data:
            code = 0 if read_report(report)["identical"] else 1
    raise SystemExit(code)


def find_script(name: str) -> Path:
    """A file, or `examples/NAME.py` of this checkout.

    Raises:
        ValueError: there is neither.
    """
    examples = Path(__file__).parents[2] / "examples"
    for path in (Path(name), examples / f"{name}.py"):
        if path.is_file():
            return path
    known = sorted(path.stem for path in examples.glob("*.py"))
    raise ValueError(f"there is no script {name!r}: give a file, or one of the examples {', '.join(known)}")


def read_config(arguments: list[str]) -> "PPOConfig":
    """The config as the script will read it: of reinforcement learning, or of supervised fine-tuning by its dataset's type."""
    from areal_core.config import PPOConfig, SFTConfig, load_expr_config
    from areal_core.config.loading import read_yaml, split_arguments

    tree = read_yaml(split_arguments(arguments)[0])
    is_sft = isinstance(data := tree.get("train_dataset"), dict) and data.get("type") == "sft"
    return load_expr_config(arguments, SFTConfig if is_sft else PPOConfig)[0]  # type: ignore[return-value]


def check_record(config: "PPOConfig", num_ranks: int) -> None:
    """Whether the record may be written, or can be replayed, by this run; an error is told before anything starts."""
    from areal_core.paths import record_folder
    from recorder import open_record
    from recorder.writer import check_folder
    from replayer.before import check_model, check_ranks

    folder = record_folder(config)
    if config.debug.dump_rollout_data:
        check_folder(folder, config.debug.overwrite)
    if config.debug.replay_rollout_data:
        record = open_record(folder)
        check_ranks(record, num_ranks)
        check_model(record, config.actor.path)


def watch_run(logs: Path) -> int:
    """Run this same command, without --watch, as a child that is watched; post-mortems go beside the logs."""
    from areal_debug.cli.hang_watch import post_mortem, tell
    from hangdoctor.watch.loop import Plan, watch_command

    command = [sys.executable, *(argument for argument in sys.argv if argument != "--watch")]
    return watch_command(command, Plan(logs / time.strftime("watch-%Y%m%d-%H%M%S")), post_mortem, tell)
