"""`areal-debug doctor`: what a run's metrics say about its learning, and what to try."""

from pathlib import Path

import click

from areal_debug.render import console, errors_as_sentences, fail, print_json


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--html", "page", type=click.Path(path_type=Path, dir_okay=False), help="Write a page with plots."
)
@click.option("--overrides", is_flag=True, help="Print only the config change that is recommended first.")
@click.option("--json", "as_json", is_flag=True, help="The same facts as JSON.")
@errors_as_sentences
def command(run: Path, page: Path | None, overrides: bool, as_json: bool) -> None:
    """Judge the metrics of RUN, a folder or file: our stats.jsonl, TensorBoard events, a Weights & Biases export, or
    trainer_state.json; by the names of AReaL, verl or TRL.

    Exit 0 when nothing is wrong, 1 when something is, 2 when there is nothing to judge.
    """
    from areal_debug.doctor.examine import document, examine, verdict
    from areal_debug.doctor.reading import read_run
    from areal_debug.doctor_output import override_lines, print_examination
    from areal_debug.doctor_page import write_page

    if page is not None and not page.parent.is_dir():
        fail(f"{page.parent} is not a folder: give --html a file in one that is there")
    read = read_run(run)
    found = examine(read)
    if page is not None:
        write_page(page, read, found)
    if as_json:
        print_json(document(read, found))
    elif overrides:
        for line in override_lines(found):
            click.echo(line)
    else:
        print_examination(console(), read, found)
    raise SystemExit({"problem": 1, "healthy": 0, "unknown": 2}[verdict(read, found)])
