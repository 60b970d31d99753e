"""Two steps of verl's default trainer, in verl's environment; prints what they trained on, as JSON.

    verl_runs.py FOLDER

Real are the trainer, its batches, its log-probs, advantages and logger, Ray and TransferQueue. The
workers are one tiny model in this process, and what it sampled is given.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import verl
from hydra import compose, initialize_config_dir
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.utils import tensordict_utils as tu

VOCABULARY, GROUP, PROMPTS = 50, 2, 2
OVERRIDES = (
    "data.train_batch_size=2", "data.train_files=[]", "data.val_files=[]",
    "actor_rollout_ref.model.path=tiny", "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.rollout.calculate_log_probs=true",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2", "algorithm.adv_estimator=grpo",
    "trainer.logger=[file]", "trainer.project_name=project", "trainer.experiment_name=run",
    "trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1",
    "trainer.total_epochs=1",
)  # fmt: skip


class Policy(torch.nn.Module):
    """The next token's distribution depends on the last token alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.logits = torch.nn.Parameter(torch.randn(VOCABULARY, VOCABULARY))

    def logprobs(self, ids: torch.Tensor) -> torch.Tensor:
        """[T]: at position t the log-prob of token t + 1, as verl's engines return it."""
        logp = torch.log_softmax(self.logits[ids], -1)
        return torch.cat([logp[:-1].gather(1, ids[1:, None])[:, 0], logp.new_zeros(1)])


def composed():
    """verl's own options."""
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer/config"), version_base=None):
        return compose("ppo_trainer", overrides=list(OVERRIDES))


def episode(rng: np.random.Generator, prompt: list[int], reward: float, versions: tuple[int, int]):
    """An episode with a tool's answer in it, its log-probs those of an engine a little off."""
    size = int(rng.integers(4, 9))
    mask = [1] * size
    mask[1:3] = [0, 0]
    return AgentLoopOutput(
        prompt_ids=prompt,
        response_ids=rng.integers(1, VOCABULARY, size).tolist(),
        response_mask=mask,
        response_logprobs=(-rng.random(size) * mask).astype(np.float32).tolist(),
        routed_experts=rng.integers(0, 8, (len(prompt) + size, 2, 2)),
        reward_score=reward,
        num_turns=2,
        metrics=AgentLoopMetrics(),
        extra_fields={
            "min_global_steps": versions[0],
            "max_global_steps": versions[1],
            "reward_extra_info": {"acc": reward > 0.5, "note": "text"},
        },
    )


def as_json(values) -> list:
    return values.detach().float().tolist() if values.is_floating_point() else values.tolist()


class Workers:
    """A worker group: TransferQueue in, TransferQueue out, as verl's workers do."""

    def __init__(self, seen: list) -> None:
        self.policy, self.seen = Policy(), seen
        self.optimizer = torch.optim.SGD(self.policy.parameters(), 0.1)
        self._dispatch_info = {"actor": [0]}

    def compute_log_prob(self, batch):
        import transfer_queue as queue

        data = queue.kv_batch_get(batch.keys, batch.partition_id, ["input_ids"])
        rows = [self.policy.logprobs(ids).detach() for ids in data["input_ids"].unbind()]
        fields = {
            "log_probs": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
            "entropy": torch.nested.as_nested_tensor([row.abs() for row in rows], layout=torch.jagged),
        }
        return queue.kv_batch_put(batch.keys, batch.partition_id, tu.get_tensordict(fields))

    def update_actor(self, batch):
        import transfer_queue as queue

        data = queue.kv_batch_get(batch.keys, batch.partition_id)
        names = [name for name in tuple(data.keys()) if isinstance(data[name], torch.Tensor)]
        rows = []
        for row, (key, tag) in enumerate(zip(batch.keys, batch.tags, strict=True)):
            if not tag.get("is_padding"):
                rows.append({name: as_json(data[name][row]) for name in names} | {"key": key, "tag": tag})
        loss = torch.zeros(())
        for row in range(len(batch.keys)):
            response, ids = data["response_mask"][row], data["input_ids"][row]
            logp = self.policy.logprobs(ids)[-len(response) - 1 : -1]
            loss = loss - (logp * data["advantages"][row] * response).sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.seen.append({"rows": rows, "loss": float(loss), "padded": len(batch.keys) - len(rows)})
        return {"metrics": {"pg_loss": [float(loss)], "grad_norm": [1.5, 2.5], "mfu": [0.0]}}


class Episodes:
    """An agent loop manager that puts given episodes where verl's put theirs."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def generate_sequences(self, prompts) -> None:
        import transfer_queue as queue

        keys, fields, tags, step = [], [], [], int(prompts["global_steps"])
        for number, uid in enumerate(prompts["uid"]):
            prompt = self.rng.integers(1, VOCABULARY, 3 + number).tolist()
            for session in range(GROUP):
                # the last session of the first prompt has two trajectories: verl adds padding rows
                for index in range(1 + (number == 0 and session == 1)):
                    versions = (step - 1 - number * (step > 1), step - 1)
                    output = episode(self.rng, prompt, float(self.rng.random()), versions)
                    field = output.as_dict()
                    field |= {"uid": uid, "multi_modal_inputs": {}}
                    field["input_ids"] = torch.cat([field["prompts"], field["responses"]])
                    field["position_ids"] = torch.arange(len(field["input_ids"]))
                    field["attention_mask"] = torch.ones_like(field["input_ids"])
                    keys.append(f"{uid}_{session}_{index}")
                    fields.append(field)
                    tags.append(
                        {
                            "status": "success",
                            "seq_len": len(field["input_ids"]),
                            "global_steps": step,
                            "min_global_steps": versions[0],
                            "max_global_steps": versions[1],
                        }
                    )
        queue.kv_batch_put(keys, "train", tu.list_of_dict_to_tensordict(fields), tags)
        done = [{"is_prompt": True, "status": "finished", "global_steps": step} for _ in prompts["uid"]]
        queue.kv_batch_put(list(prompts["uid"]), "train", tags=done)


def run_queue() -> list:
    """Two steps of the trainer that is verl's default."""
    import ray
    import transfer_queue as queue
    from verl.trainer.ppo.v1 import PPOTrainerSync

    ray.init(num_cpus=16, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    config, seen = composed(), []
    queue.init(config.transfer_queue)
    trainer = PPOTrainerSync(config)
    trainer.replay_buffer.poll_interval = 0.1
    trainer.tokenizer = SimpleNamespace(eos_token_id=1, pad_token_id=0, name_or_path="", decode=str)
    prompts = [{"raw_prompt": np.array([[], []], object), "index": np.arange(PROMPTS)}]
    trainer.train_dataloader, trainer.train_dataloader_it = prompts * 2, None
    trainer.steps_per_epoch = trainer.total_training_steps = 2
    trainer.global_steps = 0
    trainer.actor_rollout_wg = Workers(seen)
    trainer.checkpoint_manager = SimpleNamespace(
        update_weights=lambda step: None, sleep_replicas=lambda: None
    )
    trainer.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
    trainer.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 1)
    trainer._init_dump_executor()
    try:
        trainer.fit(Episodes())
    finally:
        queue.close()
        ray.shutdown()
    return seen


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    print("SEEN " + json.dumps(run_queue()))
