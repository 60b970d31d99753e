"""Every field of a request, and what becomes of it: honoured, ignored with a warning, or refused.

A field that no table of request_fields.toml has is refused, so nothing is ignored silently. A table
names nested fields ("tool_choice.type") where the parser reads an object field by field; the
contents of other fields (messages, metadata) belong to the field. `docs/agent_proxy.md` shows them.

Fields that change what is sampled are all honoured. Where the sampling differs from the run's
`gconfig`, tokens get the log-probs of the model itself (`Sampling.model_logprobs`), which are those
that the trainer computes: see `completion.sampling_of`.
"""

import logging
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from areal_core.agent.errors import BadRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rule:
    """What becomes of a field; `neutral` values request nothing, so they always pass."""

    use: str  # "honoured", "ignored" or "refused"
    why: str = ""
    neutral: tuple[Any, ...] = ()


Table = Mapping[str, Rule]
PARTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def table_of(part: str) -> dict[str, Rule]:
    """Return the rules of a part of request_fields.toml, and of the parts that it includes."""
    table: dict[str, Rule] = {}
    for included in PARTS[part].get("parts", ()):
        table |= table_of(included)
    for row in PARTS[part]["rows"]:
        rule = Rule(row["use"], row.get("why", ""), tuple(row.get("neutral", ())))
        table |= dict.fromkeys(row["names"].split(), rule)
    return table


CHAT, COMPLETIONS, RESPONSES, MESSAGES = map(table_of, ("chat", "completions", "responses", "messages"))
TABLES: Mapping[str, Table] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
}
NOTHING: tuple[Any, ...] = (None, "", [], {})


def check_fields(fields: Mapping[str, Any], table: Table, path: str = "") -> None:
    """Warn once of each field that is ignored. Raises BadRequest for a refused or unknown one."""
    for name, value in fields.items():
        full = f"{path}{name}"
        rule = table.get(full)
        if value in NOTHING or (rule is not None and value in rule.neutral):
            continue
        if rule is None:
            raise BadRequest(f"{full} is {str(value)[:80]!r}, and the proxy has no such field: leave it out")
        if rule.use == "refused":
            raise BadRequest(f"{full} is {str(value)[:80]!r}, which is not available: {rule.why}")
        if rule.use == "ignored":
            warn_once(f"a request has {full}, which is ignored: {rule.why}")
        elif any(other.startswith(f"{full}.") for other in table):
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, dict):
                    check_fields(item, table, f"{full}.")


@cache
def warn_once(message: str) -> None:
    """Log a warning the first time, since it recurs with every call."""
    logger.warning("%s", message)
