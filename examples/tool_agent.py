"""An agent with a calculator, written with plain `openai`: it contains nothing about training.

areal-debug agent run examples/tool_agent.py:CalculatorAgent \\
    --data examples/word_problems.jsonl --model MODEL
areal-debug agent stress examples/tool_agent.py:CalculatorAgent \\
    --data examples/word_problems.jsonl --model MODEL
areal-debug train examples/tool_agent.py --dump-rollout
"""

import ast
import json
import operator
import re
import sys
from typing import Any

from openai import AsyncOpenAI

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Computes an arithmetic expression with +, -, *, / and parentheses.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class CalculatorAgent:
    """Lets the model call the calculator; rewards a last number that is the row's answer."""

    def __init__(self, max_turns: int = 4) -> None:
        self.max_turns = max_turns

    async def run(self, data: dict[str, Any], **extra: Any) -> float:
        client = AsyncOpenAI(
            base_url=extra["base_url"],
            api_key=extra["api_key"],
            http_client=extra["http_client"],
            max_retries=0,
        )
        messages = list(data["messages"])
        for _ in range(self.max_turns):
            reply = await client.chat.completions.create(
                model="policy", messages=messages, tools=[CALCULATOR]
            )
            message = reply.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return float(last_number(message.content or "") == last_number(data["answer"]))
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": calculate(call.function.arguments)}
                for call in message.tool_calls
            ]
        return 0.0


def calculate(arguments: str) -> str:
    """Return the value of the expression, or an error message for the model."""
    try:
        return f"{value_of(ast.parse(json.loads(arguments)['expression'], mode='eval').body):g}"
    except (ValueError, KeyError, TypeError, SyntaxError, ArithmeticError) as error:
        return f"error: {error}"


def value_of(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return float(value)
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](value_of(left), value_of(right))
        case ast.UnaryOp(ast.USub(), operand):
            return -value_of(operand)
    raise ValueError(f"{ast.unparse(node)} is no arithmetic")


def last_number(text: str) -> float | None:
    found = NUMBER.findall(text.replace(",", ""))
    return float(found[-1]) if found else None


def main(argv: list[str]) -> None:
    # The trainer is imported here, so that the agent above can be run anywhere that openai is.
    from areal_core.config import GRPOConfig
    from areal_core.data import get_dataset
    from areal_core.trainer.build import load_tokenizer
    from areal_core.trainer.rl import PPOTrainer
    from areal_debug.wiring import wire

    config, hooks = wire(argv, GRPOConfig)
    tokenizer = load_tokenizer(config)
    train_dataset = get_dataset(config.train_dataset, tokenizer=tokenizer)
    with PPOTrainer(config, train_dataset, **hooks) as trainer:
        trainer.train(workflow=CalculatorAgent, workflow_kwargs={"max_turns": 4})


if __name__ == "__main__":
    main(sys.argv)
