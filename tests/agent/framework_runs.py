"""Episodes of `framework_agents.py` on scripted answers, in the environment of the frameworks.

Usage: python framework_runs.py AGENT CASES_JSON    outcomes as JSON
"""

import asyncio
import importlib.util
import json
import logging
import sys
from pathlib import Path

HERE = Path(__file__).parent


def module(name: str):
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    sys.modules[name] = loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def run_episodes(agent: str, cases: list[dict]) -> list[dict]:
    """Return of each case its rows and outcome, or the exception that stops a run."""
    from areal_core.agent.agent_workflow import AgentWorkflow
    from areal_core.config import AgentConfig, GenerationHyperparameters
    from areal_core.testing import make_tiny_tokenizer

    testing, agents = module("conftest"), module("framework_agents")
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = testing.TEMPLATE
    found = []
    for case in cases:
        engine = testing.LineEngine(tokenizer, case["lines"])
        options = AgentConfig(
            **{"export_style": "concat", "chat_template_type": "concat", "failed_reward": -1.0}
            | case.get("options", {})
        )
        sampling = GenerationHyperparameters(
            **{"max_new_tokens": 4096, "max_tokens": 20000} | case.get("gconfig", {})
        )
        workflow = AgentWorkflow(
            getattr(agents, agent), sampling, tokenizer, options, case.get("agent_kwargs", {})
        )
        try:
            rows = asyncio.run(workflow.arun_episode(engine, case.get("data", {})))
        except Exception as error:
            found.append({"error": type(error).__name__, "message": str(error)[:300]})
        else:
            found.append(described(rows, engine, tokenizer))
        finally:
            workflow.close()
    return found


def described(rows, engine, tokenizer) -> dict:
    from areal_core.agent.conversation import BRANCHES
    from areal_core.agent.failures import FAILURES

    return {
        "rewards": rows["rewards"].tolist(),
        "sampled": module("conftest").trained_text(tokenizer, rows),
        "branches": [BRANCHES[branch] for branch in rows["branch"].tolist()],
        "failures": [FAILURES[failure] for failure in rows["failure"].tolist()],
        "num_calls": len(engine.requests),
    }


def main(agent: str, cases: str) -> None:
    replies = sys.stdout
    sys.stdout = sys.stderr
    logging.disable(logging.INFO)
    json.dump(run_episodes(agent, json.loads(cases)), replies)


if __name__ == "__main__":
    main(*sys.argv[1:])
