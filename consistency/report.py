"""The report of a check as one JSON document: its metrics and worst tokens."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from consistency.check import Checked
from consistency.engines import Top
from consistency.measure import ALIASES, worst_tokens
from consistency.tokens import TokenTable


@dataclass(frozen=True)
class WorstToken:
    """A token with a large |D|. `before` are the preceding ids.

    `top` and `engine_top` are the most likely tokens (id, logprob) of model and engine; the latter
    is empty if the engine did not report them.
    """

    sequence: int
    position: int
    token_id: int
    engine: float
    trainer: float
    rank: int
    before: tuple[int, ...]
    top: Top
    engine_top: Top


def document(checked: Checked) -> dict[str, Any]:
    """Return the complete report as JSON-ready values; the writer handles non-finite numbers."""
    found, measured = checked.diagnosis, checked.diagnosis.measurement
    return {
        "verdict": found.verdict,
        "causes": [asdict(cause) for cause in found.causes],
        "missing": list(found.missing),
        "notes": list(checked.notes),
        "sign": "D = trainer - engine",
        "dtype": checked.dtype,
        "setting": asdict(checked.setting),
        "num_tokens": measured.num_tokens,
        "num_sequences": measured.num_sequences,
        "excluded": asdict(measured.excluded),
        "metrics": {
            **measured.metrics,
            "surprise_z": found.surprise if math.isfinite(found.surprise) else 0.0,
        },
        "names_elsewhere": ALIASES,
        "by": {column: [asdict(group) for group in groups] for column, groups in measured.by.items()},
        "trainer_check": None if checked.trainer_check is None else asdict(checked.trainer_check),
        "rescoring": None if checked.rescoring is None else asdict(checked.rescoring),
        "histogram": [list(bar) for bar in measured.histogram],
        "worst": [asdict(token) for token in describe_worst(checked)],
    }


def describe_worst(checked: Checked, count: int = 10, num_before: int = 12) -> tuple[WorstToken, ...]:
    """Return the tokens with the largest |D| in their context."""
    table: TokenTable = checked.diagnosis.table
    found = []
    for row in worst_tokens(table, count):
        index, sequence, position = int(table.index[row]), int(table.sequence[row]), int(table.position[row])
        ids = checked.sequences.input_ids[checked.sequences.row(sequence)]
        top = zip(
            checked.scores.top_ids[index].tolist(), checked.scores.top_logprobs[index].tolist(), strict=True
        )
        found.append(
            WorstToken(
                sequence,
                position,
                int(table.token_id[row]),
                float(table.engine[row]),
                float(table.trainer[row]),
                int(checked.scores.rank[index]),
                tuple(ids[max(0, position - num_before) : position].tolist()),
                tuple(top),
                () if checked.tops is None else checked.tops[index],
            )
        )
    return tuple(found)
