"""How many planted faults an agent names with `areal-debug mcp`, and without it.

    python -m benchmarks.agent_tasks [--only NAME ...] [--keep FOLDER]
    python -m benchmarks.agent_tasks --endpoint URL --model NAME [--without] [--json FILE]

By default the agent is a policy without a model (policy.py), which has to solve every task. With
--endpoint it is a model behind an OpenAI-compatible API, with the key in OPENAI_API_KEY, and with
--without it has tools that list and read files in place of the server. No model can be reached
where this was written: those rows were not run.

Exits with 1 if the policy does not solve a task.
"""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mcp import Client, StdioServerParameters, stdio_client

from areal_core.safety.interpreter import python_command
from benchmarks.agent_tasks.policy import Json, solve
from benchmarks.agent_tasks.tasks import TASKS, Reply, Task
from benchmarks.harness import SomeOf, read_options


@dataclass
class Score:
    """One task: the answer, what is wrong with it, and what it took."""

    name: str
    kind: str
    reply: Reply
    problems: list[str]
    calls: int = 0
    result_bytes: int = 0
    seconds: float = 0.0
    tokens: int = 0


@asynccontextmanager
async def connected(root: Path) -> AsyncIterator[Client]:
    command, *words = python_command("-m", "areal_debug", "mcp", "--root", str(root), "--allow-run")
    async with Client(stdio_client(StdioServerParameters(command=command, args=words))) as client:
        yield client


def folder_of(task: Task) -> str:
    """Return the name of a task's folder, which says nothing about its fault."""
    return f"run-{TASKS.index(task):02d}"


async def with_policy(client: Client, task: Task) -> Score:
    """Let the policy answer, through the SDK's client only."""
    score = Score(task.name, task.kind, Reply(""), [])

    async def call(tool: str, arguments: dict[str, Any]) -> Json:
        result = await client.call_tool(tool, arguments)
        score.calls += 1
        score.result_bytes += len(result.content[0].text)  # type: ignore[union-attr]
        found: Json = result.structured_content
        return found

    score.reply = await solve(task.kind, folder_of(task), call)
    return score


async def run(tasks: list[Task], root: Path, options: Any) -> list[Score]:
    for task in tasks:
        if not (root / folder_of(task)).exists():
            (root / folder_of(task)).mkdir(parents=True)
            task.make(root / folder_of(task))
    scores = []
    async with connected(root) as client:
        for task in tasks:
            began = time.monotonic()
            if options.endpoint:
                from benchmarks.agent_tasks.model import with_model

                found = await with_model(
                    None if options.without else client, task, root, folder_of(task), options
                )
                score = Score(task.name, task.kind, **found, problems=[])
            else:
                score = await with_policy(client, task)
            score.seconds = time.monotonic() - began
            score.problems = task.problems_of(score.reply)
            scores.append(score)
            print(line_of(score), flush=True)
    return scores


def line_of(score: Score) -> str:
    said = "; ".join(score.problems) or "solved"
    return f"{score.kind:10} {score.name:28} {score.calls:2} calls {score.result_bytes:6} B {score.seconds:6.1f} s  {said}"


def main() -> int:
    options = read_options(
        __doc__, only=SomeOf(task.name for task in TASKS), keep="", endpoint="", model="", without=False, json=""
    )  # fmt: skip
    tasks = [task for task in TASKS if task.name in options.only]
    with tempfile.TemporaryDirectory() as temporary:
        scores = asyncio.run(run(tasks, Path(options.keep or temporary).resolve(), options))
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(score) for score in scores], indent=1))
    solved = [score for score in scores if not score.problems]
    calls, tokens = (sum(getattr(score, name) for score in scores) for name in ("calls", "tokens"))
    minutes = sum(score.seconds for score in scores) / 60
    print(f"{len(solved)} of {len(scores)} solved, {calls} calls, {tokens} tokens, {minutes:.1f} minutes")
    return 0 if len(solved) == len(scores) or options.endpoint else 1


if __name__ == "__main__":
    sys.exit(main())
