"""What servers do wrong, and the schedule of it, as a pure function of a seed.

A fault is due at the n-th request of its kind of route that a server gets, and not at a time, so
that a seed repeats its faults on machines of any speed. Server 0 never sends a wrong reply and is
never killed: with no honest server left a run has to end. It is slow, busy, or breaks a connection.
"""

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

HTML = b"<html><body><h1>502 Bad Gateway</h1></body></html>"
FAR_VERSIONS, FAR_ID = 1000, 1_000_000_000
FAR_SPANS = [{"version": "0", "start": 0, "end": 10**12}]
REFUSED = json.dumps({"error": {"message": "refused by a fault"}}).encode()


@dataclass(frozen=True)
class Fault:
    """One fault of one server.

    Args:
        at: number of the request, of those to `route`, from 0.
        seconds: how long a delay, a stop, or the time until a restart lasts.
    """

    server: int
    at: int
    kind: str
    route: str = "generate"  # or "control": everything else
    seconds: float = 0.0


def entries(reply: dict[str, Any]) -> list[list[Any]]:
    """Return the `[logprob, token, None]` of a reply."""
    return reply["meta_info"]["output_token_logprobs"]


def with_logprob(value: float | None) -> Callable[[dict[str, Any]], None]:
    def spoil(reply: dict[str, Any]) -> None:
        entries(reply)[-1][0] = value

    return spoil


def with_token(value: object) -> Callable[[dict[str, Any]], None]:
    def spoil(reply: dict[str, Any]) -> None:
        entries(reply)[-1][1] = value
        if "output_ids" in reply:
            reply["output_ids"][-1] = value

    return spoil


def set_count(reply: dict[str, Any], count: int) -> None:
    """Set the number of tokens and of their versions; not the tokens."""
    meta = reply["meta_info"]
    meta["completion_tokens"] = count
    if meta.get("weight_versions"):
        meta["weight_versions"][-1]["end"] = count


def repeat_tokens(reply: dict[str, Any]) -> None:
    """Send the tokens a hundred times: more than were asked for."""
    reply["meta_info"]["output_token_logprobs"] = entries(reply) * 100
    if "output_ids" in reply:
        reply["output_ids"] *= 100
    set_count(reply, len(entries(reply)))


def drop_all_tokens(reply: dict[str, Any]) -> None:
    reply["meta_info"] |= {"output_token_logprobs": [], "finish_reason": {"type": "stop", "matched": 0}}
    reply["output_ids"] = []
    set_count(reply, 0)


def change_version(reply: dict[str, Any]) -> None:
    meta = reply["meta_info"]
    meta["weight_version"] = str(FAR_VERSIONS)
    for span in meta.get("weight_versions") or ():
        span["version"] = str(FAR_VERSIONS)


# Each changes the JSON of a reply that is valid and has at least one token.
WRONG_JSON: dict[str, Callable[[dict[str, Any]], None]] = {
    "nan": with_logprob(float("nan")),
    "minus_infinity": with_logprob(float("-inf")),
    "positive_logprob": with_logprob(3.0),
    "null_logprob": with_logprob(None),
    "id_outside_vocabulary": with_token(FAR_ID),
    "negative_id": with_token(-3),
    "id_as_text": with_token("7"),
    "id_with_fraction": with_token(7.5),
    "too_many_tokens": repeat_tokens,
    "wrong_count": lambda reply: entries(reply).pop(),
    "no_tokens": drop_all_tokens,
    "unknown_finish": lambda reply: reply["meta_info"].update(finish_reason={"type": "weird"}),
    "missing_finish": lambda reply: reply["meta_info"].pop("finish_reason"),
    "unknown_version": change_version,
    "other_request": lambda reply: reply["meta_info"].update(id="other"),
    "no_request": lambda reply: reply["meta_info"].update(id=None),
    "versions_of_other_tokens": lambda reply: reply["meta_info"].update(weight_versions=FAR_SPANS),
}
# Each is a body that is no reply at all, with status 200.
WRONG_BODY: dict[str, Callable[[bytes], bytes]] = {
    "cut_json": lambda body: body[: len(body) // 2],
    "html": lambda body: HTML,
    "null": lambda body: b"null",
    "list": lambda body: b"[1]",
    "empty": lambda body: b"",
}
WRONG_STATUS = {
    "status_400": 400,
    "status_401": 401,
    "status_403": 403,
    "status_404": 404,
    "status_429": 429,
    "status_500": 500,
    "status_503": 503,
}
OTHER_REPLY, TWICE = "reply_of_another", "reply_twice"
WRONG_WIRE = ("half_body", "reset", OTHER_REPLY, TWICE)
SLOW = ("delay", "late")  # within and beyond the client's time limit
KILL, STOP = "kill", "stop"
PROCESS = (KILL, STOP)
OF_REPLIES = (*WRONG_JSON, *WRONG_BODY, *WRONG_STATUS, *WRONG_WIRE, *SLOW)
KINDS = (*OF_REPLIES, *PROCESS)
INNOCENT = ("delay", "status_429", "status_503", "reset")  # of server 0
OF_CONTROL = ("reset", "status_500", "delay", KILL, STOP)
LONGEST_BURST = 4  # replies in a row with one fault
REQUEST_TIMEOUT_S = 2.0  # of the client
LATE_S = REQUEST_TIMEOUT_S + 0.3
# Least and most that a fault lasts; of a kill, until the server is started again.
SECONDS = {"delay": (0.01, 0.1), "late": (LATE_S, LATE_S), STOP: (0.2, 1.0), KILL: (0.05, 0.3)}


def spoil_json(kind: str, body: bytes) -> bytes | None:
    """Return a reply's body with a fault of `WRONG_JSON`; None if it has no token to spoil."""
    reply = copy.deepcopy(json.loads(body))
    if not entries(reply):
        return None
    WRONG_JSON[kind](reply)
    return json.dumps(reply).encode()


def make_schedule(
    seed: int, num_servers: int, num_requests: int, kinds: tuple[str, ...] = KINDS
) -> list[Fault]:
    """Return the faults of a run.

    Args:
        num_requests: to `/generate`, that one server gets about.
        kinds: of the servers after the first.
    """
    dice = random.Random(seed)
    due: dict[tuple[int, str, int], Fault] = {}

    def add(server: int, kind: str, route: str, at: int) -> None:
        lasts = round(dice.uniform(*SECONDS[kind]), 3) if kind in SECONDS else 0.0
        fault = Fault(server, at, kind, route, lasts)
        due.setdefault((server, route, at), fault)

    for server in range(num_servers):
        of_server = [kind for kind in kinds if server or kind in INNOCENT]
        num_bursts = 1 + dice.randrange(max(2, num_requests // 12)) if of_server else 0
        for _ in range(num_bursts):
            kind, start = dice.choice(of_server), dice.randrange(num_requests)
            length = 1 if kind in PROCESS or kind == "late" else 1 + dice.randrange(LONGEST_BURST)
            for at in range(start, start + length):
                add(server, kind, "generate", at)
        of_control = [kind for kind in OF_CONTROL if server and kind in kinds]
        for _ in range(dice.randrange(3) if of_control else 0):
            add(server, dice.choice(of_control), "control", dice.randrange(num_requests))
    return sorted(due.values(), key=lambda fault: (fault.server, fault.route, fault.at))
