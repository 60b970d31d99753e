"""The two flags of a training script, and the options that they set."""

from collections.abc import Sequence

OPTIONS = {"--dump-rollout": "dump_rollout_data", "--replay-rollout": "replay_rollout_data"}


def take_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
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
    return rest, overrides


def flag_overrides(flag: str, folder: str, overwrite: bool = False) -> list[str]:
    """Return the options that a flag sets. Recorded and replayed bits are equal only in a
    deterministic run.
    """
    return [
        f"debug.{OPTIONS[flag]}=true",
        "deterministic=true",
        *([f"debug.path={folder}"] if folder else []),
        *(["debug.overwrite=true"] if overwrite else []),
    ]
