"""`areal-debug train`: a training script on all its ranks and servers, recorded or replayed on request."""

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from areal_debug.render import console, errors_as_sentences, fail, print_json

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
    "--debug-env",
    metavar="PRESETS",
    callback=lambda context, _, names: list_or_split(context, names),
    is_eager=True,
    help="Environment presets for the ranks, as nccl,hang; 'list' explains them.",
)
@click.option(
    "--watch", is_flag=True, help="Stand beside the run, and say why it hangs before anything kills it."
)
@click.option(
    "--dry-run", is_flag=True, help="Say what the run would do and need; start nothing, download nothing."
)
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: the same facts as JSON.")
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
@errors_as_sentences
def command(
    script: str,
    config_file: str | None,
    dump_rollout: str | None,
    replay_rollout: str | None,
    debug_env: list[str],
    watch: bool,
    dry_run: bool,
    as_json: bool,
    overrides: tuple[str, ...],
) -> None:
    """Run SCRIPT (a file, or the name of an example) on its ranks and servers.

    OVERRIDES change options of the config: actor.optimizer.lr=1e-5.
    """
    from areal_core.launch.debug_env import debug_environment, make_folders
    from areal_core.launch.job import Job
    from areal_core.launch.run import run
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
    if dry_run:
        raise SystemExit(tell_plan(path, arguments, as_json))
    if as_json:
        fail("--json goes with --dry-run")
    config = read_config(arguments, path)
    replays = config.debug.replay_rollout_data
    allocation = config.allocation
    if allocation.train is not None:
        check_record(config)
    elif config.debug.dump_rollout_data or replays:
        fail(
            "the allocation has no training part, so there is nothing to record or replay: add one, as in 'sglang:d1+fsdp:d2'"
        )
    logs = run_folder(config, "logs")
    env = debug_environment(debug_env, logs)
    if watch:
        raise SystemExit(watch_run(logs))
    make_folders(env)
    report = logs / "replay_report.json"  # not in a temporary folder, which other machines would not see
    report.unlink(missing_ok=True)
    if replays:
        config.recover.mode = "disabled"

    def make_job(attempt: int) -> Job:
        script_argv = ("-m", "areal_debug.script", str(path), *arguments, *attempt_overrides(config, attempt))
        return Job(
            script_argv, config, allocation, {**env, REPORT_FILE: str(report)}, logs, with_servers=not replays
        )

    code = run(make_job)
    if code == 0 and replays:
        code = replay_exit_code(read_report(report))
    raise SystemExit(code)


def tell_plan(script: Path, arguments: list[str], as_json: bool) -> int:
    """Print what the run would do; 2 for a config that it would refuse."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # before the libraries are imported, which read it once
    from dataclasses import asdict

    from areal_core.config.loading import load_with_notes
    from areal_debug.dry_run import plan_run
    from areal_debug.dry_run_output import print_dry_run

    try:
        config, config_file, notes = load_with_notes(arguments, config_class(arguments, script))
        run = plan_run(script, config_file, config, notes)
        check_record(config)
    except ValueError as error:
        if not as_json:
            raise
        print_json({"would_run": False, "problems": str(error).splitlines()})
        return 2
    if as_json:
        print_json({"would_run": True, **asdict(run)})
    else:
        print_dry_run(console(), run)
    return 0


def replay_exit_code(report: dict[str, Any]) -> int:
    """0 for equal bits; 2 where bits may differ here, which only `areal-debug replay` can judge; 1 for other bits."""
    if report["identical"]:
        return 0
    return 2 if report["guarantee"]["kind"] in ("noise", "statistical") else 1


def list_or_split(context: click.Context, names: str | None) -> list[str]:
    """The presets that were named; 'list' explains all of them and ends."""
    if names == "list":
        from areal_debug.debug_env_output import print_presets

        print_presets()
        context.exit()
    return names.split(",") if names else []


def attempt_overrides(config: "PPOConfig", attempt: int) -> list[str]:
    """What a run that is started again is told besides: the record there is its own, to go on with or to begin anew."""
    return ["debug.overwrite=true"] if attempt > 0 and config.debug.dump_rollout_data else []


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


def read_config(arguments: list[str], script: Path | None = None) -> "PPOConfig":
    """The config as the script will read it."""
    from areal_core.config import load_expr_config

    return load_expr_config(arguments, config_class(arguments, script))[0]


def config_class(arguments: list[str], script: Path | None = None) -> type["PPOConfig"]:
    """The options that the script asks for, or else those of the method that learns from such rows."""
    from areal_core.config import DPOConfig, PPOConfig, RWConfig, SFTConfig
    from areal_core.config.loading import read_yaml, split_arguments
    from areal_debug.script_options import read_options

    if script is not None and (asked := read_options(script)) is not None:
        return asked
    data = read_yaml(split_arguments(arguments)[0]).get("train_dataset")
    kind = str(data.get("type")) if isinstance(data, dict) else ""
    methods = {"sft": SFTConfig, "rw": RWConfig, "dpo": DPOConfig}
    return methods.get(kind, PPOConfig)


def check_record(config: "PPOConfig") -> None:
    """Whether the record may be written, or can be replayed, by this run; an error is told before anything starts."""
    from areal_core.paths import record_folder
    from recorder import open_record
    from recorder.header import check_folder
    from replayer.before import check_model

    folder = record_folder(config)
    if config.debug.dump_rollout_data:
        may_continue = config.recover.mode not in ("disabled", "off")  # then it goes on with its record
        check_folder(folder, config.debug.overwrite or may_continue)
    if config.debug.replay_rollout_data:
        check_model(open_record(folder), config.actor.path)


def watch_run(logs: Path) -> int:
    """Run this same command, without --watch, as a child that is watched; post-mortems go beside the logs."""
    from areal_debug.cli.hang_watch import post_mortem, tell
    from hangdoctor.watch.loop import Plan, watch_command

    command = [sys.executable, *(argument for argument in sys.argv if argument != "--watch")]
    return watch_command(command, Plan(logs / time.strftime("watch-%Y%m%d-%H%M%S")), post_mortem, tell)
