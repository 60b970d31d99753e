"""A worker process of `reward_pool.py`: read jobs from a pipe, call the reward function, reply.

Usage: python -m areal_core.reward.reward_worker PIPE_FD REWARD_NAME TIMEOUT_S
"""

import faulthandler
import inspect
import json
import math
import numbers
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from areal_core.data.rows import rows_from_json
from areal_core.reward.functions import RewardFn, load_reward_fn
from areal_core.reward.signature import wrong_call


def main(descriptor: int, reward_name: str, timeout_s: float) -> None:
    """Serve jobs from the pipe with this file descriptor until it is closed."""
    connection = Connection(descriptor)
    os.dup2(2, 1)  # output of a reward function goes to stderr, not into a report on stdout
    try:
        reward_fn: RewardFn | BaseException = load_reward_fn(reward_name)
    except BaseException as error:  # reported with the first job, which names its row
        reward_fn = error
    connection.send_bytes(b"ready")
    while True:
        try:
            jobs = rows_from_json(connection.recv_bytes())
        except EOFError:  # the pool is gone: end what the function has left running, and this process
            os.killpg(0, signal.SIGKILL)
        guarded_at = -math.inf
        for arguments, row in jobs:
            now = time.monotonic()
            if now > guarded_at + 1.0:  # it starts a thread, which costs more than most calls
                # The pool kills a stuck worker; this ends it if the pool was killed first.
                faulthandler.dump_traceback_later(timeout_s + 2.0, exit=True)
                guarded_at = now
            connection.send_bytes(json.dumps(answer(reward_fn, arguments, row)).encode())
        faulthandler.cancel_dump_traceback_later()


def answer(reward_fn: RewardFn | BaseException, arguments: list[Any], row: dict[str, Any]) -> dict[str, Any]:
    """Return the value or error of one call, as JSON types; `value` is None unless a number."""
    try:
        if isinstance(reward_fn, BaseException):
            raise reward_fn
        value = reward_fn(*arguments, **row)
        is_finite = isinstance(value, numbers.Real) and abs(value) <= sys.float_info.max  # of any size
        number = float(value) if is_finite else None
    except BaseException as error:  # boundary: the trainer raises any exception of a user's function
        wrong = misfit(reward_fn, arguments, row)
        return {
            "value": None,
            "shown": "",
            "error": wrong or f"{type(error).__name__}: {shown(error, str)}",
            "traceback": "" if wrong else "".join(traceback.format_exception(error)),
        }
    return {"value": number, "shown": shown(value, repr), "error": "", "traceback": ""}


def shown(value: object, spell: Callable[[object], str]) -> str:
    """Return the beginning of a value's text; a class of the user's may have none."""
    try:
        return spell(value)[:200]
    except BaseException as error:
        return f"a {type(value).__name__} whose text raises {type(error).__name__}"


def misfit(reward_fn: RewardFn | BaseException, arguments: list[Any], row: dict[str, Any]) -> str:
    """Return why a function cannot be called with this row; "" if it can."""
    if isinstance(reward_fn, BaseException):
        return ""
    signature = inspect.signature(reward_fn)
    try:
        signature.bind(*arguments, **row)
    except TypeError as error:
        return f"TypeError: {wrong_call(reward_fn.__name__, signature, str(error))}\nthe row has {', '.join(row) or 'no fields'}"
    return ""


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
