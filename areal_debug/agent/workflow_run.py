"""Run one episode of a workflow; report every call of the engine (`areal-debug agent run`)."""

import time
from typing import Any

from transformers import PreTrainedTokenizerBase

from areal_core.data.batch import Batch
from areal_core.rollout.episodes import EpisodeEngine, run_episodes
from areal_core.rollout.loop_thread import LoopThread
from areal_core.rollout.types import InferenceEngine, ModelResponse
from areal_core.rollout.workflow import RolloutWorkflow
from areal_debug.agent.engine import TimedEngine
from areal_debug.agent.run import EpisodeReport, RowFacts, TurnFacts, facts_of_response, frames_of_agent


def run_workflow(
    workflow: RolloutWorkflow,
    engine: InferenceEngine,
    tokenizer: PreTrainedTokenizerBase,
    names: tuple[str, str],
    data: dict[str, Any],
    index: int,
) -> EpisodeReport:
    """Run a workflow once on a row, with the checks of training. An exception is in the report.

    Args:
        names: of the workflow and of the engine.
        index: of the row in its file; names the prompt.
    """
    began = time.monotonic()
    calls: list[tuple[ModelResponse, float]] = []
    timed = TimedEngine(engine, lambda response, took_s: calls.append((response, took_s)))
    loop = LoopThread()
    returned, error, error_at = None, None, None
    try:
        episode = EpisodeEngine(timed, index, 0)
        [returned] = loop.run(run_episodes([episode], workflow, data, check_format=True))
    except Exception as raised:  # the boundary: any exception of the workflow is reported to the user
        error = f"{type(raised).__name__}: {raised}"
        error_at = frames_of_agent(raised)
    finally:
        engine.close()
        loop.close()
    responses = [response for response, _ in calls]
    rows = [] if returned is None else describe_rows(returned, responses)
    return EpisodeReport(
        agent=names[0],
        engine=names[1],
        row=data,
        turns=[
            describe_call(number, responses[:number], response, seconds, tokenizer)
            for number, (response, seconds) in enumerate(calls)
        ],
        rows=rows,
        wall_s=time.monotonic() - began,
        notes=[] if error else notes_on(returned, rows),
        error=error,
        error_at=error_at,
    )


def describe_call(
    turn: int,
    earlier: list[ModelResponse],
    response: ModelResponse,
    seconds: float,
    tokenizer: PreTrainedTokenizerBase,
) -> TurnFacts:
    prompt = response.input_tokens
    continued = [i for i, other in enumerate(earlier) if begins_with(prompt, other)]
    return TurnFacts(
        turn=turn,
        new_messages=[{"role": "prompt", "content": str(tokenizer.decode(prompt))}],
        num_tools=0,
        continues=continued[-1] if continued else None,
        prefix_mismatch=None,
        content=str(tokenizer.decode(response.output_tokens)),
        reasoning=None,
        tool_calls=[],
        latency_s=seconds,
        reward=None,
        **facts_of_response(response, tokenizer),
    )


def describe_rows(rows: Batch, responses: list[ModelResponse]) -> list[RowFacts]:
    """Describe the returned rows, each with the calls whose exact tokens it begins with."""
    described = []
    for row in range(len(rows["input_ids"])):
        real = rows["attention_mask"][row]
        ids = rows["input_ids"][row][real].tolist()
        described.append(
            RowFacts(
                turns=[turn for turn, response in enumerate(responses) if begins_with(ids, response)],
                num_tokens=len(ids),
                num_trained=int(rows["loss_mask"][row].sum()),
                reward=float(rows["rewards"][row]),
            )
        )
    return described


def begins_with(ids: list[int], response: ModelResponse) -> bool:
    """Return whether a sequence begins with the prompt and the completion of a call."""
    called = response.input_tokens + response.output_tokens
    return ids[: len(called)] == called


def notes_on(returned: Batch | None, rows: list[RowFacts]) -> list[str]:
    """Note a sample that is left out, and rows that are not what was sampled."""
    if returned is None:
        return ["the workflow returned None: training leaves this sample out"]
    strange = [str(number) for number, row in enumerate(rows) if not row.turns]
    if not strange:
        return []
    return [
        f"row {', '.join(strange)} begins with the exact tokens of no call: was text tokenised again, or are prompt and "
        "completion not in order?"
    ]
