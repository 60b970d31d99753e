"""`areal-debug reward`: probe a reward function, or compare it with the rewards of a record."""

from dataclasses import asdict

import click

from areal_debug.cli import Verb, VerbGroup, json_option
from areal_debug.render import announce, count, fail

EXAMPLE = "areal-debug reward probe my_rewards.py:math_reward --data gsm8k/test.jsonl"

timeout_option = click.option(
    "--timeout", "timeout_s", type=click.FloatRange(0.1), default=5.0, show_default=True, metavar="SECONDS",
    help="Time for one call.",
)  # fmt: skip


@click.group(cls=VerbGroup, example=EXAMPLE)
def command() -> None:
    """Find out what a reward function pays for, and compare it with the rewards of a record."""


@command.command(
    cls=Verb, short_help="Try empty, echoed and adversarial answers on a reward function", example=EXAMPLE
)
@click.argument("function", type=click.Path(), metavar="MODULE:FN")
@click.option("--data", required=True, metavar="FILE", help="JSONL file or dataset with the rows.")
@click.option("--rows", "num_rows", type=click.IntRange(1), default=8, show_default=True, help="Rows to try.")
@click.option("--answer", "field", metavar="FIELD", help="Field of a row with its expected answer.")
@timeout_option
@json_option
def probe(
    function: str, data: str, num_rows: int, field: str | None, timeout_s: float, as_json: bool
) -> None:
    """Try empty, echoed, refusing, truncated, hedged, very long and adversarial answers on the
    reward function MODULE:FN (or FILE.py:FN), and report which it pays for.

    It is called as in training, in processes that are killed when they are stuck, with UTF-8 bytes
    in the place of token ids.

    Exit code 0: it pays for right answers alone. 1: it pays for a wrong answer, fails on one or is
    stuck. 2: inconclusive.
    """
    from areal_core.data import rows_of
    from areal_core.reward.signature import check_reward_fn
    from areal_debug.report.terminal import answer
    from areal_debug.reward.answers import question_of
    from areal_debug.reward.probe import probe as probe_function
    from areal_debug.reward.report import report_of_probe

    check_reward_fn(function, ["."], takes_row=True)
    rows = rows_of(data)
    step = max(1, len(rows) // num_rows)
    questions = [question_of(row, field) for row in rows[::step][:num_rows]]
    announce(f"trying answers on {function}")
    report = probe_function(function, data, questions, timeout_s)
    answer(asdict(report), report_of_probe(report), as_json)


@command.command(
    cls=Verb,
    short_help="Score a record with a second reward function; list disagreements",
    example="areal-debug reward rescore runs/record my_rewards.py:strict --data gsm8k/test.jsonl",
)
@click.argument("record", type=click.Path())
@click.argument("function", type=click.Path(), metavar="MODULE:FN")
@click.option("--data", metavar="FILE", help="Rows of the prompts, for a function that takes an answer.")
@click.option("--from-step", type=int, metavar="N", help="First step to score.")
@click.option("--to-step", type=int, metavar="N", help="Last step to score.")
@timeout_option
@json_option
def rescore(
    record: str,
    function: str,
    data: str | None,
    from_step: int | None,
    to_step: int | None,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Score the samples of RECORD again with the reward function MODULE:FN (or FILE.py:FN), and
    list the samples that only one of the two rewards pays for. Needs no model.

    Where they disagree, it first tries whether rewards are those of other rows: shifted from some
    row on, or in another order.

    With --data, the function gets the fields of the row whose prompt is in the recorded prompt.

    Exit code 0: the rewards agree. 1: they disagree. 2: most samples could
    not be compared.
    """
    from areal_core.data import rows_of
    from areal_core.reward.signature import check_reward_fn
    from areal_debug.report.terminal import print_answer
    from areal_debug.reward.report import report_of_rescore
    from areal_debug.reward.rescore import rescore as rescore_record
    from recorder import open_record
    from recorder.reader import describe_steps

    check_reward_fn(function, ["."], takes_row=data is not None)
    opened = open_record(record)
    rows = None if data is None else rows_of(data)
    steps = [
        step
        for step in opened.steps
        if (from_step is None or step >= from_step) and (to_step is None or step <= to_step)
    ]
    if not steps:
        fail(f"{record} has no such step: it holds {describe_steps(opened.steps)}")
    announce(f"scoring {count(len(steps), 'step')} of {record} with {function}")
    report = rescore_record(opened, function, rows, steps, timeout_s)
    sentences = [pairing.sentence for pairing in report.pairings]
    print_answer({"paired_wrongly": sentences} | asdict(report), report_of_rescore(report), as_json)
    raise SystemExit({"agree": 0, "disagree": 1, "unknown": 2}[report.verdict])
