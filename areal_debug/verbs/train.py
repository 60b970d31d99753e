"""`areal-debug train`: run a training script on all its ranks and servers, recorded or replayed."""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from areal_core.launch.debug_env import PRESETS
from areal_debug.cli import Verb, force_option, overrides_argument, script_argument, script_config_option
from areal_debug.render import (
    announce,
    console,
    fail,
    hidden_output,
    is_quiet,
    print_json,
    print_log_end,
    styled,
)
from areal_debug.verbs.doctor import HOOKS, hook_options
from areal_debug.waiting import leave_terminal

if TYPE_CHECKING:
    from areal_core.config import PPOConfig
    from areal_core.config.allocation import Allocation
    from areal_debug.doctor.hooks import Hooks

OF_WATCH = tuple(HOOKS)
NCCL_TIMEOUT_INSTEAD = (
    "NCCL_TIMEOUT has no effect, neither NCCL nor torch reads it: set AREAL_COLLECTIVE_TIMEOUT_S=300"
)


@click.command(
    cls=Verb,
    context_settings={"ignore_unknown_options": True},
    example="areal-debug train examples/gsm8k_grpo.py --config my.yaml --dump-rollout runs/record\n"
    "areal-debug train gsm8k_grpo --config my.yaml --dry-run actor.optimizer.lr=1e-5",
)
@script_argument
@script_config_option
@click.option(
    "--dump-rollout", is_flag=False, flag_value="", metavar="[DIR]", help="Record every step (into DIR)."
)
@click.option("--replay-rollout", metavar="DIR", help="Train from a record, without an inference engine.")
@force_option
@click.option(
    "--debug-env",
    metavar="PRESETS",
    callback=lambda context, _, names: list_or_split(context, names),
    is_eager=True,
    help="Environment presets for the ranks, as nccl,hang; 'list' explains them.",
)
@click.option("--watch", is_flag=True, help="Watch the run: diagnose hangs and metrics meanwhile.")
@hook_options
@click.option(
    "--dry-run", is_flag=True, help="Print what the run would do and need; start and download nothing."
)
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: print the same facts as JSON.")
@overrides_argument
def command(
    script: str,
    config_file: str | None,
    dump_rollout: str | None,
    replay_rollout: str | None,
    force: bool,
    debug_env: list[str],
    watch: bool,
    on_alarm: str,
    stop_on: str,
    dry_run: bool,
    as_json: bool,
    overrides: tuple[str, ...],
) -> None:
    """Run SCRIPT (a file, or the name of an example) on its ranks and servers.

    OPTION=VALUE changes an option of the config: actor.optimizer.lr=1e-5.
    """
    from areal_core.launch.debug_env import debug_environment, make_folders
    from areal_core.paths import make_run_folders, run_folder
    from areal_debug.doctor.hooks import NO_HOOKS, make_hooks
    from areal_debug.train.script_options import (
        check_flags,
        check_imports,
        check_model_folders,
        check_reward_functions,
        find_script,
        flag_overrides,
        read_config,
    )

    hooks = make_hooks(on_alarm, stop_on)
    if hooks != NO_HOOKS and not watch:
        fail("--on-alarm and --stop-on go with --watch")
    path = find_script(script)
    flags: list[str] = []
    if None not in (dump_rollout, replay_rollout):
        check_flags(("--dump-rollout", "--replay-rollout"))
    if dump_rollout and "=" in dump_rollout:  # the flag without DIR, and the first override after it
        dump_rollout, overrides = "", (dump_rollout, *overrides)
    if dump_rollout is not None:
        flags += flag_overrides("--dump-rollout", dump_rollout, force)
    if replay_rollout is not None:
        flags += flag_overrides("--replay-rollout", replay_rollout)
    arguments = ["--config", config_file or str(path.with_suffix(".yaml")), *flags, *overrides]
    if dry_run:
        raise SystemExit(print_plan(path, arguments, as_json))
    if as_json:
        fail("--json goes with --dry-run")
    check_imports(path)
    config = read_config(arguments, path)
    check_model_folders(config)
    check_reward_functions(path)
    allocation = check_allocation(config)
    logs = run_folder(config, "logs")
    env = debug_environment(debug_env, logs)
    if "NCCL_TIMEOUT" in os.environ and not is_quiet():
        console().print(NCCL_TIMEOUT_INSTEAD)
    if watch:
        raise SystemExit(watch_run(logs, hooks))
    announce(f"starting {path} with {config.allocation_mode}")
    make_run_folders(config)
    make_folders(env)
    announce(f"running {path.name} on {config.allocation_mode}")
    with hidden_output() if is_quiet() else nullcontext():
        code = run_script(path, arguments, config, allocation, env, logs)
    if is_quiet():
        if code:
            print_log_end(logs / "trainer.log")
        console().print(
            styled("the run ended with exit code {}; its output is in {}", code, logs / "trainer.log")
        )
    if allocation.kind == "eval" and code == 0:
        from areal_debug.verbs.eval import print_results

        print_results(config)
    raise SystemExit(code)


def list_or_split(context: click.Context, names: str | None) -> list[str]:
    if names == "list":
        print_presets()
        context.exit()
    return names.split(",") if names else []


def print_presets() -> None:
    """Print each preset: what it finds, what it costs, and what each of its variables does."""
    out = console()
    width = max(len(f"{name}={value}") for preset in PRESETS for name, value in preset.variables.items())
    for preset in PRESETS:
        out.print(styled("[bold]{}[/bold]  {}", preset.name, preset.purpose))
        out.print(styled("  cost: {}", preset.cost))
        for name, value in preset.variables.items():
            setting = f"{name}={value}"
            out.print(styled("  {}  [dim]{}[/dim]", f"{setting:<{width}}", preset.meaning[name]))
        out.print()
    out.print(NCCL_TIMEOUT_INSTEAD)
    out.print("To use some of them: areal-debug train SCRIPT --debug-env nccl,hang")


def print_plan(script: Path, arguments: list[str], as_json: bool) -> int:
    """Print what the run would do; return exit code 0, or 2 for a config that it would refuse."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # before the libraries are imported, which read it once
    from dataclasses import asdict

    from areal_core.errors import ConfigError
    from areal_core.safety.secrets import masker
    from areal_debug.dry_run.plan import columns_of, plan_run
    from areal_debug.dry_run.report import report_of
    from areal_debug.report.terminal import print_answer
    from areal_debug.train.script_options import (
        check_imports,
        check_model_folders,
        check_record,
        check_reward_functions,
        load_options,
    )

    problems: dict[str, str] = {}  # by the option that they begin with

    def checked(check: Callable[..., Any], *given: Any) -> Any:
        try:
            return check(*given)
        except ValueError as error:
            for line in str(error).splitlines():
                problems.setdefault(line.partition(": ")[0], line)

    checked(check_imports, script)
    config, config_file, notes = checked(load_options, arguments, script) or (None, "", [])
    if config is not None:
        checked(check_model_folders, config)
        run = checked(plan_run, script, config_file, config, notes)
        is_readable = "train_dataset.path" not in problems
        checked(check_reward_functions, script, (is_readable and checked(columns_of, config)) or ())
        checked(check_record, config)
    if problems:
        if not as_json:
            raise ConfigError("\n".join(problems.values()))
        print_json({"would_run": False, "problems": list(problems.values())})
        return 2
    print_answer(masker().tree({"would_run": True, **asdict(run)}), report_of(run), as_json)
    return 0


def check_allocation(config: "PPOConfig") -> "Allocation":
    """Return where the run is placed, after checking its record.

    Raises ConfigError, RecordError, ReplayError.
    """
    from areal_debug.train.script_options import check_record

    allocation = config.allocation
    if allocation.train is not None:
        check_record(config)
    elif config.debug.dump_rollout_data or config.debug.replay_rollout_data:
        fail(
            "the allocation has no training part, so there is nothing to record or replay: add one, as in 'sglang:d1+fsdp:d2'; "
            "areal-debug eval records what it samples"
        )
    return allocation


def run_script(
    path: Path,
    arguments: list[str],
    config: "PPOConfig",
    allocation: "Allocation",
    env: dict[str, str],
    logs: Path,
) -> int:
    """Run the script, restarted as configured in `recover`; return the exit code."""
    from areal_core.launch.job import Job
    from areal_core.launch.run import run
    from areal_debug.render import REPORT_FILE, VERBOSE, is_verbose, read_report

    replays = config.debug.replay_rollout_data
    # Not in a temporary folder, which other machines would not see.
    report = logs / "replay_report.json"
    report.unlink(missing_ok=True)
    if replays:
        config.recover.mode = "disabled"
        env = env | {REPORT_FILE: str(report)} | ({VERBOSE: "1"} if is_verbose() else {})

    def make_job(attempt: int) -> Job:
        # a restarted run resumes or replaces its own record
        own = ["debug.overwrite=true"] if attempt > 0 and config.debug.dump_rollout_data else []
        script_argv = ("-m", "areal_debug.train.script", str(path), *arguments, *own)
        return Job(script_argv, config, allocation, env, logs, with_servers=not replays)

    code = run(make_job)
    if code == 0 and replays:
        code = replay_exit_code(read_report(report))
    return code


def replay_exit_code(report: dict[str, Any]) -> int:
    """Return 0 for equal bits, 1 for other bits, 2 if bits may differ.

    Only `areal-debug replay` can decide the last case, by measuring the noise floor. A record of
    rollouts alone was trained on, and has nothing to compare: 0.
    """
    if report["identical"] or report["guarantee"]["kind"] == "unrecorded":
        return 0
    return 2 if report["guarantee"]["kind"] in ("noise", "statistical") else 1


def watch_run(logs: Path, hooks: "Hooks") -> int:
    """Run this same command, without --watch, as a watched child, and follow its statistics.

    Post-mortems are written next to the logs. Returns the child's exit code, or 1 if a finding
    has stopped it.
    """
    from areal_core.safety.interpreter import python_command
    from areal_debug.doctor.follow import Follower
    from areal_debug.doctor.report import alarm_lines
    from areal_debug.hang.watch import post_mortem, report
    from hangdoctor.watch.loop import Plan, watch_command

    out = console(stderr=True)

    def announce(alarm: Mapping[str, Any]) -> None:
        out.print(*alarm_lines(alarm), sep="\n")

    def note(text: str) -> None:
        out.print(styled("doctor: {}", text))

    leave_terminal()  # to the run
    follower = Follower(logs / "stats.jsonl", announce, note, hooks, label=logs.name)

    def waiting(pid: int) -> Callable[[float], object]:
        follower.pid = pid

        def wait(poll_s: float) -> None:
            if follower.path.exists():
                follower.poll()
            time.sleep(poll_s)

        return wait

    command = python_command(*without_watch(sys.argv), file_is_ours=True)
    plan = Plan(logs / time.strftime("watch-%Y%m%d-%H%M%S"))
    code = watch_command(command, plan, post_mortem, report, waiting)
    if follower.path.exists():
        follower.look(is_last=True)
    return 1 if follower.is_stopped else code


def without_watch(arguments: Sequence[str]) -> list[str]:
    kept, words = [], iter(arguments)
    for word in words:
        option, has_value, _ = word.partition("=")
        if option in OF_WATCH and not has_value:
            next(words, None)
        elif option not in (*OF_WATCH, "--watch"):
            kept.append(word)
    return kept
