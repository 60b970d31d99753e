"""A worker of mode "subproc": read episodes from stdin, run the agent, write its results.

Usage: python -m areal_core.agent.subprocess_worker AGENT ARGUMENTS_JSON
"""

import asyncio
import json
import os
import sys
import traceback
from typing import Any, TextIO

import httpx

from areal_core.agent.agents import load_agent
from areal_core.agent.failures import describe_raised
from areal_core.data.rows import rows_from_json
from areal_core.telemetry.in_episode import collecting


def main(path: str, arguments: str) -> None:
    """Run the episodes of stdin with one agent, one after the other."""
    # The output of an agent goes to stderr, so that it does not mix with the replies.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    agent = load_agent(path, json.loads(arguments))
    for line in sys.stdin:
        job = rows_from_json(line)
        os.environ |= {
            "OPENAI_BASE_URL": job["base_url"],
            "OPENAI_API_KEY": job["api_key"],
            "ANTHROPIC_BASE_URL": job["base_url"],
            "ANTHROPIC_API_KEY": job["api_key"],
        }
        with collecting() as scalars:
            reply = asyncio.run(run(agent, job))
        send(replies, reply | {"scalars": scalars})


async def run(agent: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Return the result of the agent, or the error that it raised."""
    try:
        async with httpx.AsyncClient(timeout=None) as http_client:
            returned = await agent.run(
                job["data"], base_url=job["base_url"], api_key=job["api_key"], http_client=http_client
            )
    except Exception as error:  # the boundary: the trainer raises it again
        described = "".join(traceback.format_exception(error))
        return {
            "returned": None,
            "error": f"{type(error).__name__}: {error}",
            "traceback": described,
            "raised": describe_raised(error).as_json(),
        }
    return {"returned": returned, "error": ""}


def send(replies: TextIO, reply: dict[str, Any]) -> None:
    """Write a reply as one line.

    Values that are not JSON become text, which the trainer refuses as a reward.
    """
    replies.write(json.dumps(reply, default=repr) + "\n")
    replies.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
