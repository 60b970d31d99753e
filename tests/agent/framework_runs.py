"""Episodes and training steps of `framework_agents.py`, in the environment of the frameworks.

Usage: python framework_runs.py episodes AGENT CASES_JSON    scripted answers: outcomes as JSON
       python framework_runs.py train AGENT MODEL FOLDER     two steps on the embedded engine
"""

import asyncio
import dataclasses
import importlib.util
import json
import logging
import sys
from pathlib import Path

HERE = Path(__file__).parent


def module(name: str):
    """Import a file of this folder."""
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

    sampled = [
        tokenizer.decode(i[m.bool()]) for i, m in zip(rows["input_ids"], rows["loss_mask"], strict=True)
    ]
    return {
        "rewards": rows["rewards"].tolist(),
        "sampled": sampled,
        "branches": [BRANCHES[branch] for branch in rows["branch"].tolist()],
        "failures": [FAILURES[failure] for failure in rows["failure"].tolist()],
        "num_calls": len(engine.requests),
    }


def train(agent: str, model: Path, folder: Path) -> dict:
    """Train two steps; compare every sampled token with the record of what was trained."""
    from areal_core.config import GRPOConfig
    from areal_core.data import get_dataset
    from areal_core.trainer import build_rollouts
    from areal_core.trainer.build import load_tokenizer
    from areal_core.trainer.rl import PPOTrainer
    from areal_debug.wiring import wire

    agents = module("framework_agents")
    sampled = planned_engine(build_rollouts, agents, agent, model)
    config, hooks = wire(
        [
            *("--config", str(HERE.parent / "debug" / "tiny.yaml"), "--dump-rollout", str(folder / "record")),
            *(f"cluster.fileroot={folder}", f"actor.path={model}", "total_train_steps=2"),
            *("train_dataset.batch_size=2", "rollout.consumer_batch_size=2", "gconfig.n_samples=2"),
            *(
                "gconfig.max_tokens=2000",
                "actor.mb_spec.max_tokens_per_mb=16000",
                "actor.reward_norm.group_size=2",
            ),
            *("rollout.agent.export_style=concat", "rollout.agent.chat_template_type=concat"),
            "rollout.agent.failed_reward=-0.5",
        ],
        GRPOConfig,
    )
    dataset = get_dataset(config.train_dataset, tokenizer=load_tokenizer(config))
    with PPOTrainer(config, dataset, **hooks) as trainer:
        trainer.train(workflow=getattr(agents, agent), workflow_kwargs={"max_turns": 3})
    steps, stats = compared(folder / "record", sampled), stats_of(folder)
    return {"steps": steps, "stats": stats, "returned": agents.RETURNED}


def planned_engine(build_rollouts, agents, name: str, model: Path) -> list:
    """Let the first turn of every episode call the tool; return the list of all answers."""
    from transformers import AutoTokenizer

    from areal_core.rollout.types import ModelResponse

    line = agents.RUNS_TOOL if name == "SmolAgents" else agents.CALLS_TOOL
    tokens = AutoTokenizer.from_pretrained(model).encode(f"{line}<|end|>", add_special_tokens=False)
    answers = []

    class Planned(build_rollouts.EmbeddedEngine):
        async def agenerate(self, req):
            if req.metadata["turn"]:
                answer = await super().agenerate(req)
            else:
                answer = ModelResponse(
                    input_tokens=req.input_ids,
                    output_tokens=tokens,
                    output_logprobs=[-1.0 - i / 8 for i in range(len(tokens))],
                    output_versions=[self.version] * len(tokens),
                    stop_reason="stop",
                )
            answers.append(
                (req.metadata["prompt_id"], req.metadata["sample_id"], req.metadata["turn"], answer)
            )
            return answer

    build_rollouts.EmbeddedEngine = Planned
    return answers


def compared(record: Path, sampled: list) -> list[dict]:
    """Match each answer with the tokens of the loss mask that its row says it sampled."""
    import numpy as np

    from areal_core.agent.conversation import BRANCHES
    from areal_core.agent.failures import FAILURES
    from recorder import open_record

    by_name = {(prompt, sample, turn): answer for prompt, sample, turn, answer in sampled}
    opened, steps = open_record(record), []
    for number in opened.steps:
        step, trained, wrong = opened.step(number), [], 0
        for index in range(step.num_rows(0)):
            row = step.rows(0, index)
            mask = row["loss_mask"] == 1
            for turn in np.unique(row["turns"][mask]):
                places = np.flatnonzero((row["turns"] == turn) & mask)
                name = (int(row["prompt_id"]), int(row["episode"]), int(turn) - 1)
                answer, begin, end = by_name[name], places[0], places[-1] + 1
                wrong += row["input_ids"][:begin].tolist() != answer.input_tokens
                wrong += row["input_ids"][begin:end].tolist() != answer.output_tokens
                wrong += row["logprobs"][begin:end].tolist() != np.float32(answer.output_logprobs).tolist()
                wrong += row["versions"][begin:end].tolist() != answer.output_versions
                trained.append(name)
        arrays = step.batch(0)
        of_step = {name for name in by_name if name[0] in set(arrays["prompt_id"].tolist())}
        steps.append(
            {
                "wrong": int(wrong),
                "twice": len(trained) - len(set(trained)),
                "missing": len(of_step - set(trained)),
                "calls": len(trained),
                "rewards": arrays["rewards"].tolist(),
                "branches": [BRANCHES[branch] for branch in arrays["branch"].tolist()],
                "failures": [FAILURES[failure] for failure in arrays["failure"].tolist()],
            }
        )
    return steps


def stats_of(folder: Path) -> list[dict]:
    """Return the statistics of agents of each step."""
    (file,) = folder.rglob("stats.jsonl")
    wanted = (
        "rollout/broken_prefix",
        "rollout/episode_failed",
        "rollout/n_",
        "ppo_actor/grad_norm",
        "grad_norm",
    )
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [{key: value for key, value in line.items() if key.startswith(wanted)} for line in lines]


def main(verb: str, agent: str, *arguments: str) -> None:
    replies = sys.stdout
    sys.stdout = sys.stderr
    logging.disable(logging.INFO)
    if verb == "episodes":
        facts = run_episodes(agent, json.loads(arguments[0]))
    else:
        facts = train(agent, Path(arguments[0]), Path(arguments[1]))
    json.dump(facts, replies, default=lambda value: dataclasses.asdict(value))


if __name__ == "__main__":
    main(*sys.argv[1:])
