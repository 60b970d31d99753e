"""`areal-debug record redact`: a copy of a record to show to others."""

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from areal_debug.cli import Verb, json_option, skip_damaged_option
from areal_debug.confined import ANYWHERE, reads_untrusted
from areal_debug.render import console, count, end_if_damaged, print_json, styled, with_progress

if TYPE_CHECKING:
    from recorder.redact import Redacted


def compiled(
    context: click.Context, option: click.Parameter, patterns: tuple[str, ...]
) -> list[re.Pattern[str]]:
    """Compile the patterns; a wrong one is the user's mistake."""
    try:
        return [re.compile(pattern) for pattern in patterns]
    except re.error as error:
        raise click.BadParameter(f"{error.pattern!r} is no regular expression: {error}") from error


@click.command(
    cls=Verb,
    short_help="Write a copy of a record without credentials, texts or pictures",
    example="areal-debug record redact runs/record --to shared --pattern 'ACME-[0-9]+'\n"
    "areal-debug record redact runs/record --to shared --without-text --without-images",
)
@click.argument("record", type=click.Path(path_type=Path))
@click.option(
    "--to", "destination", type=click.Path(path_type=Path), required=True, help="New folder for the copy."
)
@click.option(
    "--pattern",
    "patterns",
    multiple=True,
    callback=compiled,
    help="Also mask what matches this regular expression; may be repeated.",
)
@click.option("--without-text", is_flag=True, help="Leave out texts and calls, and mask every token.")
@click.option("--without-images", is_flag=True, help="Leave out pictures, in which nothing can be masked.")
@skip_damaged_option
@json_option
@reads_untrusted("record", outputs="destination", reads=ANYWHERE)
def redact(
    record: Path,
    destination: Path,
    patterns: list[re.Pattern[str]],
    without_text: bool,
    without_images: bool,
    skip_damaged: bool,
    as_json: bool,
) -> None:
    """Write a copy of RECORD in which credentials are masked: in texts, in the messages, tool calls
    and results of agents, in the config, and in the tokens themselves.

    Weights and anchors are not copied. A step with masked tokens replays to other numbers.
    """
    from areal_debug.record.decode import load_decoder
    from recorder import open_record
    from recorder.reader import Damage
    from recorder.redact import Rules, redact_record
    from recorder.verify import intact_steps

    if destination.exists() or destination.is_symlink():
        raise ValueError(f"{destination} exists already: give another path, a copy is never replaced")
    damage = Damage()
    opened = open_record(record, damage if skip_damaged else None)
    left_out: dict[str, int] = {}
    steps = intact_steps(opened, opened.steps, skip_damaged, left_out)
    decode = load_decoder(opened)
    rules = Rules(patterns, not without_text, not without_images)
    done = with_progress(
        "redacting",
        len(opened.steps),
        lambda tick: redact_record(opened, destination, rules, decode, tick, steps),
    )
    if as_json:
        print_json(asdict(done) | {"record": str(destination)})
    else:
        show_redacted(done, destination, without_text)
    end_if_damaged((*left_out, *damage.found))


def show_redacted(done: "Redacted", destination: Path, without_text: bool) -> None:
    out = console()
    masked = "all texts and tokens left out" if without_text else f"{done.num_masked:,} matches masked"
    out.print(styled("{}: {}, {}", destination, count(done.num_steps, "step"), masked))
    if done.num_rows:
        steps = count(len(done.steps_changed), "step")
        out.print(
            styled(
                "{} in {} with masked tokens: these steps cannot be replayed",
                count(done.num_rows, "row"),
                steps,
            )
        )
    if done.num_images:
        out.print(
            styled("{} as they are: --without-images leaves them out", count(done.num_images, "picture"))
        )
