"""Agents in worker processes (mode "subproc"), for frameworks that block or read os.environ.

    run() --> idle workers --> one line of JSON to the worker's stdin -->
    asyncio.run(agent.run(...)) --> one line back
              waits for one    (areal_core.agent.subprocess_worker)          calls the proxy over its port

Each worker runs one episode at a time, so `subproc_max_workers` is the number of concurrent
episodes. A worker that dies fails its episode; a cancelled episode ends its worker, and the next
episode starts a new one.
"""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from typing import Any

from areal_core.agent.agents import name_of
from areal_core.agent.errors import AgentError, AgentRaised
from areal_core.agent.failures import raised_from_json
from areal_core.data.rows import rows_to_json
from areal_core.telemetry.in_episode import record_all

LONGEST_LINE_BYTES = 64 << 20


class AgentProcesses:
    """Worker processes, started on demand. All methods run on one event loop."""

    def __init__(self, agent: Any, arguments: Mapping[str, Any], max_workers: int) -> None:
        self._agent = agent
        self._arguments = arguments
        self._slots = asyncio.Semaphore(max_workers)
        self._idle: list[Process] = []

    async def run(self, data: Mapping[str, Any], base_url: str, api_key: str) -> Any:
        """Return the result of the agent. Raises AgentRaised with what the agent raised."""
        job = rows_to_json({"data": data, "base_url": base_url, "api_key": api_key})
        async with self._slots:
            worker = self._idle.pop() if self._idle else await self._start()
            try:
                reply = await request(worker, job)
            except BaseException:
                await end(worker)
                raise
            self._idle.append(worker)
        record_all(reply["scalars"])
        if reply["error"]:
            message = f"{name_of(self._agent)} raised {reply['error']}\n{reply['traceback'].rstrip()}"
            raise AgentRaised(message, raised_from_json(reply["raised"]))
        return reply["returned"]

    async def close(self) -> None:
        """End the idle workers."""
        while self._idle:
            await end(self._idle.pop())

    async def _start(self) -> Process:
        if not isinstance(self._agent, str | type):
            raise AgentError(
                f"rollout.agent.mode is 'subproc' and the agent is an object of {name_of(self._agent)}: give its class or its import path"
            )
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "areal_core.agent.subprocess_worker",
            name_of(self._agent),
            json.dumps(dict(self._arguments)),
            stdin=PIPE,
            stdout=PIPE,
            limit=LONGEST_LINE_BYTES,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )


async def request(worker: Process, job: str) -> dict[str, Any]:
    """Send one job to a worker and return its reply. Raises AgentError if the process ended."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(f"{job}\n".encode())
    await worker.stdin.drain()
    line = await worker.stdout.readline()
    if not line:
        raise AgentError(
            f"the process of an agent ended with exit code {await worker.wait()} during an episode"
        )
    return json.loads(line)


async def end(worker: Process) -> None:
    """Kill the process, if it still runs, and wait for it."""
    if worker.returncode is None:
        worker.kill()
    await worker.wait()
