"""Read the options of a training script without running it, and check them before it starts.

The config class is read from the script's text. `--dump-rollout` and `--replay-rollout` are
translated into overrides of options.
"""

import ast
import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Any

from areal_core.config import GRPOConfig, PPOConfig
from areal_core.config.experiment import METHODS
from areal_core.config.import_paths import replacements
from areal_core.config.rules import ALL
from areal_core.errors import ConfigError
from areal_core.safety.secrets import masker
from areal_debug.installation import EXAMPLES

logger = logging.getLogger(__name__)
LOADERS = ("load_expr_config", "wire")

OPTIONS = {"--dump-rollout": "dump_rollout_data", "--replay-rollout": "replay_rollout_data"}
CLASSES = {cls.__name__: cls for cls in METHODS.values()} | {"GRPOConfig": GRPOConfig}


def options_of_script(text: str) -> type[Any] | None:
    """Return the config class that the script passes to `load_expr_config` or `wire`.

    None if it is unknown. For a class that the script itself derives from one of ours, the fields
    that it adds are options without a type.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return None  # the run will report it with its line
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    wanted = next((name for call in ast.walk(tree) if (name := loaded_class(call)) is not None), None)
    own: list[str] = []
    while wanted in classes:
        node = classes.pop(wanted)
        own += [
            item.target.id
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        ]
        wanted = next((last_name(base) for base in node.bases), None)
    if wanted not in CLASSES:
        return None
    method = CLASSES[wanted]
    if not own:
        return method
    return make_dataclass(
        method.__name__, [(name, Any, field(default=None)) for name in own], bases=(method,)
    )


def loaded_class(node: ast.AST) -> str | None:
    if isinstance(node, ast.Call) and last_name(node.func) in LOADERS and len(node.args) == 2:
        return last_name(node.args[1])
    return None


def last_name(node: ast.expr) -> str | None:
    """Return `c` of `a.b.c`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def read_options(script: Path) -> type[Any] | None:
    return options_of_script(script.read_text(encoding="utf-8", errors="replace"))


def find_script(name: str) -> Path:
    """Return a file, or the example NAME or NAME.py.

    Raises:
        ValueError: neither exists.
    """
    for path in (Path(name), EXAMPLES / f"{name.removesuffix('.py')}.py"):
        if path.is_file():
            return path
    # those that make data, as tldr_data.py, read no config and train nothing
    known = sorted(path.stem for path in EXAMPLES.glob("*.py") if read_options(path) is not None)
    raise ValueError(f"there is no script {name!r}: give a file, or one of the examples {', '.join(known)}")


def read_config(arguments: list[str], script: Path | None = None) -> PPOConfig:
    """Return the config as the script will read it, with its notes logged. Raises ConfigError."""
    config, path, notes = load_options(arguments, script)
    for note in notes:
        logger.warning("%s: %s", path, note)
    return config


def load_options(arguments: list[str], script: Path | None = None) -> tuple[PPOConfig, str, list[str]]:
    """Return the config as the script will read it, the file's path, and notes.

    A file whose `allocation_mode` has servers only needs no options of training.

    Raises ConfigError.
    """
    from areal_core.config.loading import load_with_notes, read_yaml, split_arguments

    cls = config_class(arguments, script)
    try:
        return load_with_notes(arguments, cls)
    except ConfigError:
        path, overrides = split_arguments(arguments)
        if "allocation_mode" in {*read_yaml(path), *(text.partition("=")[0] for text in overrides)}:
            with suppress(ConfigError):
                served = load_with_notes(arguments, cls, role="rollout")
                if served[0].allocation.train is None:
                    return served
        raise


def config_class(arguments: list[str], script: Path | None = None) -> type[PPOConfig]:
    """Return the script's config class, else that of the method for the type of the dataset."""
    from areal_core.config.loading import read_yaml, split_arguments

    if script is not None and (used := read_options(script)) is not None:
        return used
    return method_of(read_yaml(split_arguments(arguments)[0]))


def method_of(tree: dict[str, Any]) -> type[Any]:
    data = tree.get("train_dataset")
    kind = str(data.get("type", "")) if isinstance(data, dict) else ""
    if "model" in tree and "actor" not in tree:  # supervised methods, before 0.5.2
        kind = kind or "sft"
    return METHODS.get(kind, PPOConfig)


def check_imports(script: Path) -> None:
    """Check that a script imports nothing from an AReaL that is not installed.

    Raises:
        ConfigError: it does; with what to write instead.
    """
    if lines := list(replacements(script.read_text(encoding="utf-8", errors="replace"))):
        raise ConfigError(
            f"{script} imports from AReaL, which is not installed; here these names are\n  "
            + "\n  ".join(lines)
            + "\ndocs/coming_from_areal.md lists where their arguments differ"
        )


def check_model_folders(config: PPOConfig) -> None:
    """Raise ConfigError for models that are not in a folder which is here: no name on the hub."""
    from areal_debug.serve.start import CannotServe, checked_model

    models = {name: getattr(config, name, None) for name in ALL}
    paths, problems = {f"{name}.path": model.path for name, model in models.items() if model is not None}, []
    for option, path in (paths | {"tokenizer_path": config.tokenizer_path}).items():
        try:
            found = checked_model(path, needs="") if path else "."
        except CannotServe as error:
            problems.append(f"{option}: {error}")
            continue
        if not Path(found).is_dir():
            logger.warning(
                "there is no folder %s here: %s would be taken from the hub", masker().text(str(path)), option
            )
    if problems:
        raise ConfigError("\n".join(problems))


def check_reward_functions(script: Path, columns: Collection[str] = ()) -> None:
    """Check the reward functions that a script passes to a trainer by name, without running it.

    `columns` are those of the rows, where they are known.

    Functions that are not in the script itself, or in a file next to it or below the current
    folder, are checked when the run starts.

    Raises:
        RewardError: one cannot be called as a reward function; with the right signature.
    """
    from areal_core.reward.signature import check_reward_fn, check_signature, signature_in_text

    text = script.read_text(encoding="utf-8", errors="replace")
    for name, takes_row in reward_functions(text):
        own = signature_in_text(text, name)
        if own is not None:
            check_signature(name, own, takes_row, columns)
        elif "." in name:
            check_reward_fn(name, (script.parent, Path()), takes_row, columns)


def reward_functions(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the names after `"reward_fn":` in calls of `train`, and whether they get the row.

    `RLVRWorkflow`, which is the default, passes the fields of the row. An imported function has the
    name of its module in front.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError:  # the run reports it with its line
        return
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for call in ast.walk(tree):
        if not (isinstance(call, ast.Call) and last_name(call.func) == "train"):
            continue
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        arguments, workflow = given.get("workflow_kwargs"), given.get("workflow", next(iter(call.args), None))
        for key, value in (
            zip(arguments.keys, arguments.values, strict=True) if isinstance(arguments, ast.Dict) else ()
        ):
            if isinstance(key, ast.Constant) and key.value == "reward_fn":
                name = name_in(value)
                if name:
                    yield (
                        imported.get(name, name),
                        workflow is None or name_in(workflow).endswith("RLVRWorkflow"),
                    )


def name_in(node: ast.expr) -> str:
    """Return the text of a string constant, or the name of a variable; "" for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return node.id if isinstance(node, ast.Name) else ""


def check_record(config: PPOConfig) -> None:
    """Check that this run may write its record, or can replay it.

    Raises RecordError, ReplayError.
    """
    from areal_core.paths import record_folder, run_folder
    from recorder import open_record
    from recorder.header import check_folder
    from replayer.preconditions import check_model, check_values

    folder = record_folder(config)
    if config.debug.dump_rollout_data:
        # A run that continues from a checkpoint appends to its record.
        saved = (run_folder(config, "checkpoints") / "recover").glob("step-*")
        continues = config.recover.mode in ("auto", "on", "resume") and any(saved)
        check_folder(folder, config.debug.overwrite or continues)
    if config.debug.replay_rollout_data:
        record = open_record(folder)
        check_model(record, config.actor.path)
        check_values(record, config, 0, max(record.steps, default=0))


def clear_for_record(folder: Path, source: str | Path) -> None:
    """Empty a folder of an earlier record, for --force. Raises as `check_for_record`."""
    from recorder.header import clear_record
    from recorder.lock import writing

    check_for_record(folder, source)
    if folder.exists():
        with writing(folder, "--force"):
            clear_record(folder)


def check_for_record(folder: Path, source: str | Path) -> None:
    """Check that --force may replace what a folder holds.

    Raises:
        RecordExists: it holds something that is not part of a record.
        ValueError: the record that is read is inside the folder, or the folder inside the record.
    """
    from recorder.header import check_folder

    new, old = folder.resolve(), Path(source).resolve()
    if new.is_relative_to(old) or old.is_relative_to(new):
        raise ValueError(f"{folder} overlaps the record {source} that is read: choose another folder")
    check_folder(folder, overwrite=True)


def split_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments without the two flags, and the overrides that the flags set."""
    rest: list[str] = []
    overrides: list[str] = []
    arguments = list(argv)
    while arguments:
        argument = arguments.pop(0)
        name, equals, value = argument.partition("=")
        if name not in OPTIONS:
            rest.append(argument)
            continue
        if not equals and arguments and not arguments[0].startswith("-") and "=" not in arguments[0]:
            value = arguments.pop(0)
        overrides += flag_overrides(name, value)
    check_flags([argument.partition("=")[0] for argument in argv])
    return rest, overrides


def check_flags(names: Sequence[str]) -> None:
    """Raise ConfigError if both flags are among the names."""
    if set(OPTIONS) <= set(names):
        raise ConfigError(f"{' and '.join(OPTIONS)} are both given: a run records or replays, not both")


def flag_overrides(flag: str, folder: str, overwrite: bool = False) -> list[str]:
    """Return the overrides that a flag stands for.

    Recorded and replayed bits are equal only in a deterministic run.
    """
    return [
        f"debug.{OPTIONS[flag]}=true",
        "deterministic=true",
        *([f"debug.path={folder}"] if folder else []),
        *(["debug.overwrite=true"] if overwrite else []),
    ]
