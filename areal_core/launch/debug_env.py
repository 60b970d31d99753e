"""Environment presets for debugging a stuck, slow or dead run: what each sets, shows and costs.

Most of these variables are read once, when torch, CUDA or NCCL start, so they must be set before
the ranks start.
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_core.errors import ConfigError


@dataclass(frozen=True)
class Preset:
    """Variables that belong together. `{logs}` in a value is the run's log folder."""

    name: str
    purpose: str
    cost: str
    variables: dict[str, str]
    meaning: dict[str, str]  # of each variable, in one phrase


TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
PRESETS = tuple(
    Preset(
        name,
        row["purpose"],
        row["cost"],
        {variable: value for variable, (value, _) in row["variables"].items()},
        {variable: does for variable, (_, does) in row["variables"].items()},
    )
    for name, row in TABLE.items()
)


def debug_environment(names: Sequence[str], log_dir: Path) -> dict[str, str]:
    """Return the variables of the named presets together.

    Raises ConfigError for an unknown name.
    """
    known = {preset.name: preset for preset in PRESETS}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"there is no preset {unknown[0]!r}; expected any of {', '.join(known)}, or 'list'")
    chosen = (known[name].variables for name in names)
    return {name: value.format(logs=log_dir) for variables in chosen for name, value in variables.items()}


def make_folders(env: dict[str, str]) -> None:
    """Create the folders that the variables name, since torch writes only into existing ones."""
    if "TORCH_FR_DUMP_TEMP_FILE" in env:
        Path(env["TORCH_FR_DUMP_TEMP_FILE"]).parent.mkdir(parents=True, exist_ok=True)
