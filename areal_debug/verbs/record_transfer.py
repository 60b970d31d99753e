"""`areal-debug record import` and `export`: convert between a record and other tools' formats."""

import importlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from areal_debug.cli import (
    Verb,
    force_option,
    json_option,
    overrides_argument,
    skip_damaged_option,
    step_option,
)
from areal_debug.confined import CPU_S, describes_limits, reads_untrusted
from areal_debug.render import announce, end_if_damaged
from areal_debug.report.model import Report
from areal_debug.report.terminal import print_answer

FORMATS = ("jsonl", "parquet", "pt", "slime", "hf")
OF_TORCH = ("pt", "slime")


@click.command(
    cls=Verb,
    short_help="Write a record from rollout files of another framework",
    example="areal-debug record import rollouts/ --to runs/record --config my.yaml --model MODEL",
)
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--from", "format_name", help="The format; by default recognised by names and contents.")
@click.option(
    "--to", "destination", type=click.Path(path_type=Path), required=True, help="New folder for the record."
)
@click.option("--config", type=click.Path(path_type=Path), help="YAML file of the run that will train on it.")
@click.option("--set", "settings", multiple=True, hidden=True)
@click.option("--model", type=click.Path(), help="The model that the first step starts from.")
@force_option
@json_option
@overrides_argument
@describes_limits(CPU_S)
def import_record(
    source: Path,
    format_name: str | None,
    destination: Path,
    config: Path | None,
    settings: tuple[str, ...],
    model: str | None,
    force: bool,
    as_json: bool,
    overrides: tuple[str, ...],
) -> None:
    """Write a record from SOURCE, a file or the folder of an experiment of slime, miles, verl,
    prime-rl, NeMo-RL, SkyRL, ROLL, xtuner, open-instruct, AReNo, AReaL or TRL.

    What its format does not have is recorded as unknown, and what is left out is printed. Nothing
    that a pickle names is imported. With --config and --model
    the record can be replayed; OPTION=VALUE changes an option of the config, and `areal-debug
    replay DEST -o X` records the replay.
    """
    from recorder.trainers.importing import import_record as write_record

    options = resolve_config(config, (*settings, *overrides), model)
    announce(f"importing {source}")
    imported = write_record(source, destination, format_name, options, model, force)
    document = asdict(imported) | {"record": str(destination)}
    size = f"{imported.num_samples} samples, {imported.num_tokens:,} tokens, in {destination}"
    notes = ["not carried by the format, or assumed:", *(f"  {note}" for note in imported.notes)]
    report = Report(f"{len(imported.steps)} steps of {imported.format}", size, "", notes)
    print_answer(document, report, as_json)


def resolve_config(
    config: Path | None, settings: tuple[str, ...], model: str | None
) -> dict[str, Any] | None:
    """Return the checked options of a run from a YAML file; None without one."""
    if config is None:
        return None
    from areal_core.config import GRPOConfig, config_to_dict, load_expr_config

    overrides = [*settings, *([f"actor.path={model}"] if model else [])]
    resolved, _ = load_expr_config(["--config", str(config), *overrides], GRPOConfig)
    return config_to_dict(resolved)


@click.command(
    cls=Verb,
    short_help="Write a record as JSON lines, Parquet or another tool's files",
    example="areal-debug record export runs/record --format jsonl --to samples.jsonl\n"
    "areal-debug record export runs/record --format parquet --to samples",
)
@click.argument("record", type=click.Path(path_type=Path))
@click.option(
    "--format", "format_name", type=click.Choice(FORMATS), required=True, help="Format of the files."
)
@click.option(
    "--to",
    "destination",
    type=click.Path(path_type=Path),
    required=True,
    help="File to write; pt and slime have one per step: put {step} into its name. A folder for hf, and "
    "for parquet a table by step unless the name ends in .parquet.",
)
@click.option(
    "--images",
    type=click.Choice(("bytes", "files")),
    default="bytes",
    show_default=True,
    help="With jsonl, parquet and hf: pictures in the table, or files in DESTINATION.images and their paths.",
)
@step_option("all steps")
@skip_damaged_option
@force_option
@json_option
@describes_limits(CPU_S)
def export(format_name: str, **options: Any) -> None:
    """Write the samples of RECORD as JSON lines, Parquet, torch tensors, slime's rollout data, or a
    dataset of Hugging Face.

    What is not known is null, or absent.
    """
    if format_name in OF_TORCH:  # here: CUDA's packages need a temporary file, which the child has not
        importlib.import_module("torch")
    export_confined(format_name=format_name, **options)


@reads_untrusted("record", outputs="destination", cpu_s=60)
def export_confined(
    record: Path,
    format_name: str,
    destination: Path,
    step: int | None,
    force: bool,
    images: str,
    skip_damaged: bool,
    as_json: bool,
) -> None:
    from recorder.tables.formats import export_record

    announce(f"exporting {record} as {format_name}")
    exported = export_record(record, format_name, destination, step, force, images, skip_damaged)
    more = f" and {len(exported.files) - 1} more files" if len(exported.files) > 1 else ""
    written = f"{len(exported.steps)} steps in {exported.files[0]}{more}"
    lost = f"not carried by {format_name}: {'; '.join(exported.lost)}"
    print_answer(asdict(exported), Report(written, "", "", notes=[lost]), as_json)
    end_if_damaged(exported.left_out)
