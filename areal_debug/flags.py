"""The two flags of a training script, as the options that they stand for."""

from collections.abc import Sequence

OPTIONS = {"--dump-rollout": "dump_rollout_data", "--replay-rollout": "replay_rollout_data"}


def take_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Arguments without the two flags, and the overrides that the flags stand for."""
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


def flag_overrides(flag: str, folder: str) -> list[str]:
    """The options that a flag stands for. Record and replay meet only if the run is deterministic."""
    return [
        f"debug.{OPTIONS[flag]}=true",
        "deterministic=true",
        *([f"debug.path={folder}"] if folder else []),
    ]
