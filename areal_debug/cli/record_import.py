"""`areal-debug record import`: a record of what another framework left behind."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from areal_debug.render import console, errors_as_sentences, escaped, print_json

if TYPE_CHECKING:
    from recorder.importers.importing import Imported


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--from", "format_name", help="The format; it is found from names and contents unless given.")
@click.option(
    "--to", "destination", type=click.Path(path_type=Path), required=True, help="A new folder for the record."
)
@click.option("--config", type=click.Path(path_type=Path), help="YAML of the run that is to train on it.")
@click.option("--set", "settings", multiple=True, metavar="OPTION=VALUE", help="Set an option of the config.")
@click.option("--model", type=click.Path(), help="The model that the first step starts from.")
@click.option("--force", is_flag=True, help="Replace a record that is there.")
@click.option("--json", "as_json", is_flag=True, help="The same facts as JSON.")
@errors_as_sentences
def import_record(
    source: Path,
    format_name: str | None,
    destination: Path,
    config: Path | None,
    settings: tuple[str, ...],
    model: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write a record of SOURCE, a file or folder of slime, miles, verl, prime-rl, NeMo-RL, SkyRL, ROLL, xtuner, open-instruct or AReaL.

    Pickles are read in a process of their own that imports nothing they name. With --config and --model the record replays as any other;
    `areal-debug replay DEST --record-to X` then records what our trainer makes of it.
    """
    from recorder.importers.importing import import_record as write_record

    options = resolve_config(config, settings, model)
    name = "slime" if format_name == "miles" else format_name
    imported = write_record(source, destination, name, options, model, force)
    if as_json:
        print_json(asdict(imported) | {"record": str(destination)})
    else:
        print_imported(imported, destination)


def resolve_config(
    config: Path | None, settings: tuple[str, ...], model: str | None
) -> dict[str, Any] | None:
    """The options of a run from a YAML file, checked; None without one."""
    if config is None:
        return None
    from areal_core.config import GRPOConfig, config_to_dict, load_expr_config

    overrides = [*settings, *([f"actor.path={model}"] if model else [])]
    resolved, _ = load_expr_config(["--config", str(config), *overrides], GRPOConfig)
    return config_to_dict(resolved)


def print_imported(imported: "Imported", destination: Path) -> None:
    """What there is now, and what the format could not carry."""
    out = console()
    out.print(
        f"{len(imported.steps)} steps of {imported.format}: {imported.num_samples} samples, "
        f"{imported.num_tokens:,} tokens, in {destination}"
    )
    out.print("not carried by the format, or assumed:")
    for note in imported.notes:
        out.print(escaped(f"  {note}"))
