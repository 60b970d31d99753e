"""An agent that plans with tools: a plan, then its steps with the calculator, then the answer.

areal-debug agent run examples/plan_agent.py:PlanningAgent \\
    --data examples/word_problems.jsonl --model MODEL
areal-debug train examples/plan_agent.py --config examples/tool_agent.yaml --dump-rollout
"""

import json
import sys
from typing import Any

from openai import AsyncOpenAI
from tool_agent import CALCULATOR, calculate, last_number

PLAN = {
    "type": "function",
    "function": {
        "name": "plan",
        "description": "Writes or replaces the plan: the steps that are left, in order.",
        "parameters": {
            "type": "object",
            "properties": {"steps": {"type": "array", "items": {"type": "string"}}},
            "required": ["steps"],
        },
    },
}
ASKED = "Plan first: call `plan`. Calculate one step of it at a time. Then answer."


class PlanningAgent:
    """Lets the model plan, revise its plan and calculate; each call has a reward of its own.

    Args:
        max_turns: calls of the model, after which there is no answer.
        plan_reward: of a call that writes the first plan, if as many steps are then calculated.
    """

    def __init__(self, max_turns: int = 8, plan_reward: float = 0.2) -> None:
        self.max_turns, self.plan_reward = max_turns, plan_reward

    async def run(self, data: dict[str, Any], **extra: Any) -> dict[str, float]:
        client = AsyncOpenAI(
            base_url=extra["base_url"],
            api_key=extra["api_key"],
            http_client=extra["http_client"],
            max_retries=0,
        )
        messages: list[Any] = [{"role": "system", "content": ASKED}, *data["messages"]]
        steps: list[str] = []
        num_done, planned_by, rewards = 0, None, {}
        for _ in range(self.max_turns):
            reply = await client.chat.completions.create(
                model="policy", messages=messages, tools=[PLAN, CALCULATOR]
            )
            message = reply.choices[0].message
            messages.append(message)
            rewards[reply.id] = 0.0
            if not message.tool_calls:
                right = last_number(message.content or "") == last_number(data["answer"])
                if planned_by is not None and num_done >= len(steps) > 0:
                    rewards[planned_by] = self.plan_reward
                return rewards | {reply.id: float(right)}
            for call in message.tool_calls:
                result = "error: plan first"
                if call.function.name == "plan":
                    steps, num_done = steps_of(call.function.arguments), 0
                    planned_by = planned_by or reply.id
                    result = f"{len(steps)} steps; the first: {steps[0]}" if steps else "error: no steps"
                elif planned_by is not None:
                    result, num_done = calculate(call.function.arguments), num_done + 1
                    result += f"; next: {steps[num_done]}" if num_done < len(steps) else "; the plan is done"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return rewards


def steps_of(arguments: str) -> list[str]:
    """Return the steps of a call of `plan`; none of one that is not as its description says."""
    try:
        steps = json.loads(arguments)["steps"]
    except (ValueError, KeyError, TypeError):
        return []
    return [str(step) for step in steps] if isinstance(steps, list) else []


def main(argv: list[str]) -> None:
    from areal_core.config import GRPOConfig
    from areal_core.data import get_dataset
    from areal_core.trainer.build import load_tokenizer
    from areal_core.trainer.rl import PPOTrainer
    from areal_debug.wiring import wire

    config, hooks = wire(argv, GRPOConfig)
    train_dataset = get_dataset(config.train_dataset, tokenizer=load_tokenizer(config))
    with PPOTrainer(config, train_dataset, **hooks) as trainer:
        trainer.train(workflow=PlanningAgent)


if __name__ == "__main__":
    main(sys.argv)
