"""A record as a notebook shows it: where it is from, and its last steps."""

from dataclasses import replace
from html import escape

from areal_core.safety.printable import printable
from recorder.reader import Record, describe_steps, summarise_steps

SHOWN = 10  # steps


def html_of(record: Record) -> str:
    """Return HTML whose every text from the record is escaped. Raises DamagedRecord."""
    last = replace(record, steps=record.steps[-SHOWN:])
    rows = [
        (
            str(step.step),
            f"{step.num_rows:,}",
            f"{step.num_tokens:,}",
            "" if step.mean_reward is None else f"{step.mean_reward:.4g}",
        )
        for step in summarise_steps(last, lambda step: None)
    ]
    head = "".join(f"<th>{name}</th>" for name in ("step", "samples", "tokens", "mean reward"))
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    facts = [record.path, describe_steps(record.steps), record.header.trainer or "", record.header.created]
    title = " · ".join(escape(printable(fact, 200)) for fact in facts if fact)
    more = "" if len(rows) == len(record.steps) else f"<p>The last {len(rows)} steps:</p>"
    return f"<p><b>Record</b> {title}</p>{more}<table><tr>{head}</tr>{body}</table>"
