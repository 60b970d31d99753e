"""Real agent frameworks: their rows, and what the model or the code does wrong.

They run in an environment of their own (`install_frameworks.sh`).
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from areal_core.environment import DETERMINISTIC
from tests.agent.conftest import CALLS_WEATHER as TOOL
from tests.command_line import installed

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
INVENTED = '<tool_call>{"name": "nope", "arguments": {}}</tool_call>'
WRONG = '<tool_call>{"name": "weather", "arguments": {"town": 5}}</tool_call>'
CUT = '<tool_call>{"name": "weather", "argum...'
CODE = 'Thought: a\n<code>\nprint(weather("Oslo"))\n</code>'
FINISHED = '<code>\nfinal_answer("rain")\n</code>'
THOUGHT = "<think>hm</think>"
AGENTS = (
    *("OpenAIAgents", "LangGraph", "PydanticAI", "SmolAgents", "AutoGen"),
    *("OpenAIResponsesAgents", "PydanticAIAnthropic", "AutoGenTeam"),
)
TWO_TURNS = {"agent_kwargs": {"max_turns": 2}}
VALIDATED = {"agent_kwargs": {"validate": True}}
SHORT = {"gconfig": {"max_tokens": 100}}
FAULT = {"agent_kwargs": {"fault": "tool"}}

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def python() -> str:
    return installed(HERE / "install_frameworks.sh")


def run(python: str, agent: str, cases: list[dict]) -> list[dict]:
    done = subprocess.run(
        [python, str(HERE / "framework_runs.py"), agent, json.dumps(cases)],
        capture_output=True,
        text=True,
        timeout=400,
        env=os.environ | DETERMINISTIC | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def outcome(kind: str, *sampled: str) -> dict:
    return {"failures": [kind], "rewards": [-1.0], "sampled": ["".join(sampled)]}


def stops(error: str) -> dict:
    """The exception that stops the run."""
    return {"error": error}


END = "<|end|>"
# Agent, what happens, the scripted answers and options, and what becomes of the episode.
CASES = [
    ("OpenAIAgents", "invented tool", [INVENTED], {}, outcome("invalid_output", INVENTED, END)),
    ("OpenAIAgents", "wrong arguments", [WRONG], {}, outcome("invalid_output", WRONG, END)),
    ("OpenAIAgents", "too many turns", [TOOL] * 3, TWO_TURNS, outcome("too_many_turns", *[TOOL, END] * 2)),
    ("OpenAIAgents", "prompt too long", [TOOL], SHORT, outcome("prompt_too_long", TOOL, END)),
    ("OpenAIAgents", "tool without database", [TOOL], FAULT, stops("UserError")),
    ("OpenAIResponsesAgents", "truncated", [CUT], {}, outcome("truncated", CUT)),
    ("OpenAIResponsesAgents", "prompt too long", [TOOL], SHORT, outcome("prompt_too_long", TOOL, END)),
    ("LangGraph", "too many turns", [INVENTED] * 4, {}, outcome("too_many_turns", *[INVENTED, END] * 3)),
    ("LangGraph", "invalid output", ["sun"], VALIDATED, outcome("invalid_output", "sun", END)),
    ("LangGraph", "prompt too long", [TOOL], SHORT, outcome("prompt_too_long", TOOL, END)),
    ("LangGraph", "tool without database", [TOOL], FAULT, stops("ConnectionError")),
    ("PydanticAI", "invented tool", [INVENTED] * 2, {}, outcome("invalid_output", *[INVENTED, END] * 2)),
    ("PydanticAI", "wrong arguments", [WRONG] * 2, {}, outcome("invalid_output", *[WRONG, END] * 2)),
    ("PydanticAI", "invalid output", ["sun"] * 2, VALIDATED, outcome("invalid_output", *["sun", END] * 2)),
    ("PydanticAI", "too many turns", [TOOL] * 3, TWO_TURNS, outcome("too_many_turns", *[TOOL, END] * 2)),
    ("PydanticAI", "prompt too long", [TOOL], SHORT, outcome("prompt_too_long", TOOL, END)),
    ("PydanticAI", "tool without database", [TOOL], FAULT, stops("ConnectionError")),
    ("PydanticAIAnthropic", "prompt too long", [TOOL], SHORT, outcome("prompt_too_long", TOOL, END)),
    ("SmolAgents", "prompt too long", [CODE], {"gconfig": {"max_tokens": 200}}, outcome("prompt_too_long", CODE, END)),
    ("SmolAgents", "KeyError of the agent", [FINISHED], FAULT, stops("KeyError")),
    ("AutoGen", "invalid output", ["sun"], VALIDATED, outcome("invalid_output", "sun", END)),
    ("AutoGen", "prompt too long", [TOOL], SHORT, outcome("prompt_too_long", TOOL, END)),
    ("AutoGen", "ImportError of the agent", ["sun"], FAULT, stops("ImportError")),
    ("AutoGenTeam", "prompt too long", [TOOL], SHORT, outcome("prompt_too_long", TOOL, END)),
    ("AutoGenTeam", "engine without answers", [], {}, stops("IndexError")),
]  # fmt: skip


@pytest.mark.parametrize("agent", AGENTS)
def test_what_the_model_does_wrong_keeps_its_tokens_and_what_code_does_wrong_stops_the_run(python, agent):
    cases = [(name, lines, case, expected) for of, name, lines, case, expected in CASES if of == agent]
    found = run(python, agent, [{"lines": lines} | case for _, lines, case, _ in cases])
    shown = {name: each for (name, *_), each in zip(cases, found, strict=True)}
    assert {name: {key: shown[name][key] for key in expected} for name, *_, expected in cases} == {
        name: expected for name, *_, expected in cases
    }


def test_every_call_of_a_code_agent_that_runs_out_of_steps_has_the_failed_reward(python):
    case = {"lines": [CODE] * 3, "agent_kwargs": {"max_turns": 2, "validate": True}}
    (found,) = run(python, "SmolAgents", [case])
    assert found["failures"] == ["too_many_turns"] * 3
    assert found["rewards"] == [-1.0] * 3
    assert found["branches"] == ["root", "edited", "system_rewritten"]


@pytest.mark.parametrize("agent", AGENTS)
def test_an_episode_is_credited_as_a_whole_however_the_framework_renders_it(python, agent):
    lines = [CODE, FINISHED] if agent == "SmolAgents" else [THOUGHT + TOOL, "It will rain."]
    hf = {"lines": lines, "options": {"chat_template_type": "hf"}}
    exact, rendered = run(python, agent, [{"lines": lines}, hf])
    reasons = {"SmolAgents": "edited", "PydanticAIAnthropic": "system_rewritten"}
    broken = ["root", reasons.get(agent, "reasoning")]
    assert rendered["branches"] == broken
    assert rendered["rewards"] == [1.0, 1.0]
    assert exact["branches"] == (broken if agent in reasons else ["root"])
    assert exact["rewards"] == [1.0] * len(exact["branches"])
