"""A policy without a model: it follows the calls that results offer, and reads their verdicts.

It sees the kind of question, the folder and results, nothing else: what it solves proves that the
results carry what the next step needs.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from benchmarks.agent_tasks.tasks import NONE, Reply

Json = Mapping[str, Any]
Call = Callable[[str, dict[str, Any]], Awaitable[Json]]
MOST_CALLS = 12
TOOL = {  # that answers a kind of question
    "hang": "diagnose_hang",
    "learning": "diagnose_learning",
    "difference": "why_differs",
    "data": "verify_record",
    "logprobs": "check_logprobs",
    "replay": "replay",
}
READS_MORE = ("explain_finding", "show_sample", "query")  # for a person or a model


async def solve(kind: str, folder: str, call: Call) -> Reply:
    """Call tools until the one for this kind of question has a verdict; return the answer."""
    waiting: list[Json] = [{"tool": "list_runs", "arguments": {"path": folder}}]
    seen: list[Json] = []
    while waiting and len(seen) < MOST_CALLS:
        asked = min(waiting, key=lambda one: one["tool"] != TOOL[kind])
        waiting.remove(asked)
        result = await call(asked["tool"], dict(asked["arguments"]))
        seen.append(asked)
        if asked["tool"] == TOOL[kind] and result["status"] != "refused":
            return reply_of(kind, result)
        offered = [{"tool": one["tool"], "arguments": one["arguments"]} for one in result["next"]]
        waiting += [one for one in offered if one["tool"] not in READS_MORE and one not in (*seen, *waiting)]
    return Reply("no verdict")


def reply_of(kind: str, result: Json) -> Reply:
    verdict, data = result["verdict"], result["data"]
    if kind == "hang":
        return Reply(verdict, ranks=tuple(data.get("culprit_ranks", ())))
    if kind in ("data", "replay"):
        step = data.get("first_different")
        return Reply(verdict, step=step, names=str(data))
    if kind == "difference":
        if verdict == "identical":
            return Reply(NONE)
        return Reply(
            data["cause"]["kind"],
            step=data["step"],
            names=f"{data['stage']}: {data['tensor']}, {data['cause']['what']}",
        )
    found = data.get("alarms" if kind == "learning" else "causes", [])
    if not found:
        return Reply(NONE)
    return Reply(found[0]["id"], step=found[0].get("onset"), names=str(found[0]))
