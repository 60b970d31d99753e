"""`areal-debug eval`: evaluate models on the validation rows of a training script."""

import ast
import json
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from areal_debug.cli import Verb, json_option, overrides_argument, script_argument, script_config_option
from areal_debug.render import announce, fail, hidden_output, is_quiet, print_log_end

if TYPE_CHECKING:
    from areal_core.config import PPOConfig
    from areal_debug.eval.results import Report

# The options of training, recording and logging that an evaluation sets itself: a step of a record
# per model, in a trial of its own, whose files are not those of the training run.
OWN_OPTIONS = ("~actor.backend", "~stats_logger", "~recover", "~debug", "actor.use_lora=false")
OPTIONS_OF_SAMPLES = (
    "~rollout.backend",
    "consistency.every_k_steps=0",
    "debug.dump_rollout_data=true",
    "debug.dump_scope=rollout",
    "debug.overwrite=true",
)

TRAINERS = ("PPOTrainer", "SFTTrainer", "RWTrainer", "DPOTrainer")


@click.command(
    cls=Verb,
    context_settings={"ignore_unknown_options": True},
    example="areal-debug eval examples/gsm8k_grpo.py --config my.yaml\n"
    "areal-debug eval gsm8k_grpo --config my.yaml --baseline --ckpt CHECKPOINT --samples 8\n"
    "areal-debug eval --compare BEFORE AFTER --fail-below -0.02",
)
@script_argument
@script_config_option
@click.option(
    "--ckpt", "checkpoints", multiple=True, type=click.Path(path_type=Path), metavar="FOLDER",
    help="Model to evaluate, or a folder of several; by default actor.path.",
)  # fmt: skip
@click.option("--baseline", is_flag=True, help="Evaluate actor.path too, first.")
@click.option(
    "--on", "rows", type=click.Choice(["valid", "train"]), default="valid", show_default=True,
    help="Rows to evaluate on.",
)  # fmt: skip
@click.option(
    "--rows", "max_rows", type=click.IntRange(1), help="Number of rows, the first ones; by default all."
)
@click.option(
    "--samples",
    "n_samples",
    type=click.IntRange(1),
    help="Samples of each row; by default n_samples of eval_gconfig.",
)
@click.option("--k", "ks", metavar="K,K", help="The k of pass@k; by default 1 and the number of samples.")
@click.option(
    "--solved-above", type=float, default=0.0, show_default=True, metavar="REWARD",
    help="A sample solves its row if its reward is above this.",
)  # fmt: skip
@click.option(
    "--compare", is_flag=True,
    help="Instead of a script and options: folders of evaluations, compared with the first one.",
)  # fmt: skip
@click.option(
    "--fail-below", type=float, metavar="DIFFERENCE",
    help="Exit with 1 if a model's mean reward minus the first one's is below this; of supervised methods the "
    "first one's loss minus the model's.",
)  # fmt: skip
@json_option
@overrides_argument
def command(
    script: str,
    config_file: str | None,
    checkpoints: tuple[Path, ...],
    baseline: bool,
    rows: str,
    max_rows: int | None,
    n_samples: int | None,
    ks: str | None,
    solved_above: float,
    compare: bool,
    fail_below: float | None,
    as_json: bool,
    overrides: tuple[str, ...],
) -> None:
    """Evaluate models with the training script SCRIPT and its config, unchanged: no optimizer, no
    training step. Every model answers the same rows, by the workflow that SCRIPT trains with. A
    supervised SCRIPT measures the loss of its validation rows or pairs.

    OPTION=VALUE changes an option of the config: eval_gconfig.temperature=0.6.

    Exit code 0: all models were evaluated. 1: a model or a server failed, a model is below
    --fail-below, or with --compare alone worse than the first one. 2: misuse.
    """
    from areal_core.launch.job import Job
    from areal_core.launch.run import run as launch
    from areal_core.paths import make_run_folders, run_folder
    from areal_debug.eval.saved import compare_saved, exit_code, parse_ks
    from areal_debug.train.script_options import check_reward_functions, find_script

    if compare:
        report = compare_saved([Path(script), *map(Path, overrides)], ks, solved_above)
        print_any(report, as_json)
        raise SystemExit(exit_code(report, fail_below, fails_if_worse=True))
    path = find_script(script)
    check_reward_functions(path)
    arguments = ["--config", config_file or str(path.with_suffix(".yaml")), *overrides]
    config = read_training_config(arguments, path)
    models = [str(folder) for given in checkpoints for folder in models_in(given)]
    check_options(config, path, n_samples, ks)
    if config.allocation.has_servers:
        check_shapes(config.actor.path, models)
    arguments += [*overrides_of_evaluation(config, n_samples), f"evaluator.rows={rows}"]
    if max_rows is not None:
        arguments.append(f"evaluator.max_rows={max_rows}")
    if models:
        listed = [config.actor.path, *models] if baseline else models
        arguments.append(f"evaluator.checkpoints={json.dumps(listed)}")
    config = read_training_config(arguments, path)
    if has_samples(config):
        parse_ks(ks, (config.eval_gconfig or config.gconfig).n_samples)
    if rows == "valid" and config.valid_dataset is None and not passes_validation_rows(path):
        fail(
            f"there are no validation rows: {path.name} passes none to its trainer and the config has no valid_dataset: set "
            "valid_dataset.path and valid_dataset.type, or evaluate on the training rows with --on train"
        )
    logs = run_folder(config, "logs")
    make_run_folders(config)
    hides, argv = as_json or is_quiet(), ("-m", "areal_debug.train.script", str(path), *arguments)
    announce(f"evaluating with {path.name} on {config.allocation_mode}")
    with hidden_output() if hides else nullcontext():
        code = launch(lambda attempt: Job(argv, config, config.allocation, {}, logs))
    if code:
        if hides:
            print_log_end(logs / "trainer.log")
        raise SystemExit(code)
    report = print_results(config, ks, solved_above, as_json)
    raise SystemExit(exit_code(report, fail_below, fails_if_worse=False))


def read_training_config(arguments: list[str], script: Path) -> "PPOConfig":
    from areal_core.config.loading import load_with_notes
    from areal_debug.train.script_options import config_class

    return load_with_notes(arguments, config_class(arguments, script))[0]


def has_samples(config: "PPOConfig") -> bool:
    """Return whether the script samples; a supervised one measures given rows."""
    from areal_core.config import PPOConfig

    return isinstance(config, PPOConfig)


def check_options(config: "PPOConfig", script: Path, n_samples: int | None, ks: str | None) -> None:
    given = [name for name, value in {"--samples": n_samples, "--k": ks}.items() if value is not None]
    if given and not has_samples(config):
        fail(
            f"{' and '.join(given)} is of samples, and {script.name} trains with {type(config).__name__}, which samples "
            "nothing: leave it out"
        )


def passes_validation_rows(script: Path) -> bool:
    """Return whether a script may pass rows of its own to its trainer, as far as its text shows.

    Otherwise a missing one would only be found once the servers have started.
    """
    from areal_debug.train.script_options import last_name

    try:
        tree = ast.parse(script.read_text(encoding="utf-8", errors="replace"))
    except SyntaxError:  # the run reports it with its line
        return True
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    trainers = [call for call in calls if last_name(call.func) in TRAINERS]
    return not trainers or any(
        len(call.args) > 2 or any(keyword.arg == "valid_dataset" for keyword in call.keywords)
        for call in trainers
    )


def overrides_of_evaluation(config: "PPOConfig", n_samples: int | None) -> list[str]:
    """Return the overrides that make a training run an evaluation. Raises AllocationError."""
    samples = has_samples(config)
    overrides = [
        *OWN_OPTIONS,
        *(OPTIONS_OF_SAMPLES if samples else ()),
        f"debug.group_readable={str(config.debug.group_readable).lower()}",
        f"allocation_mode={config.allocation.for_evaluation(samples)}",
        f"trial_name={config.trial_name}-eval",
    ]
    if n_samples is not None:
        section = "gconfig" if config.eval_gconfig is None else "eval_gconfig"
        overrides.append(f"{section}.n_samples={n_samples}")
    return overrides


def models_in(folder: Path) -> list[Path]:
    """Return the folder of a model, or those of the models in it, by their numbers.

    Raises:
        ValueError: it is missing, or holds no model.
    """
    if not folder.is_dir():
        raise ValueError(
            f"--ckpt {folder} is not a folder: give a model that a run has saved, as checkpoints/.../default/globalstep9; "
            "a model of the hub is given by actor.path=NAME"
        )
    if is_model(folder):
        return [folder]
    if (folder / "checkpoint.json").is_file():
        raise ValueError(
            f"--ckpt {folder} is a recovery checkpoint, of shards: give a model of saver, in checkpoints/.../default"
        )
    # deterministic: sorted below
    found = [below for below in folder.iterdir() if is_model(below)]
    if not found:
        raise ValueError(
            f"--ckpt {folder} holds no config.json or adapter_config.json, so no model: give a folder that saver wrote"
        )
    return sorted(found, key=lambda model: (number_in(model.name), model.name))


def check_shapes(started_with: str, models: Sequence[str]) -> None:
    """Check that servers of one model can load the others, as far as their config.json shows.

    Raises:
        ValueError: the first that has other shapes.
    """
    from areal_core.servers.identity import SIZES, run_model

    own = run_model(started_with).config
    for path in models:
        other = run_model(path).config
        for name in SIZES:
            if name in own and name in other and own[name] != other[name]:
                raise ValueError(
                    f"--ckpt {path} has {name} {other[name]}, and the servers start with {started_with}, which has {own[name]}: "
                    f"evaluate it by itself, with actor.path={path}"
                )


def number_in(name: str) -> float:
    """Return the last number in a name, as of globalstep9; infinity in one without, as final."""
    return float(([*re.findall(r"\d+", name)] or ["inf"])[-1])


def is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file()


def print_results(
    config: "PPOConfig", ks: str | None = None, solved_above: float = 0.0, as_json: bool = False
) -> "Report":
    """Print the results that an evaluation has left next to its logs, and return them.

    Args:
        ks, solved_above: as of `report_of`.
    """
    from areal_core.paths import record_folder, run_folder
    from areal_debug.eval.saved import FOLDER, report_of

    record = record_folder(config)
    shown = str(record) if (record / "record.json").exists() else None
    run = f"{config.experiment_name}/{config.trial_name}"
    report = report_of(run_folder(config, "logs") / FOLDER, run, ks, solved_above, shown)
    print_any(report, as_json)
    return report


def print_any(report: "Report", as_json: bool) -> None:
    from areal_debug.eval.report import report_of
    from areal_debug.report.terminal import print_answer

    print_answer(asdict(report), report_of(report), as_json)
