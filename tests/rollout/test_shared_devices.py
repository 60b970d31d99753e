"""A trainer and a server that use the same devices in turn: `sglang:d1|fsdp:d1`."""

from contextlib import contextmanager

import pytest
import torch
from aiohttp import web

from areal_core.config import GRPOConfig, config_from_dict
from areal_core.engine.offload import storages
from areal_core.engine.ranks import leave_ranks
from areal_core.environment import ADDRESSES_VARIABLE
from areal_core.rollout.errors import SharingFailed
from areal_core.rollout.http_thread import HttpThread
from areal_core.telemetry.loggers import read_stats
from areal_core.testing.embedded_server import EmbeddedServer
from areal_core.trainer.rl import PPOTrainer

ROWS = [{"messages": [{"role": "user", "content": f"{i} + {i} ="}]} for i in range(12)]
CONTROL = ("pause_generation", "continue_generation", "flush_cache")


async def by_prompt(prompt, completions, prompt_ids, completion_ids, **row) -> float:
    """A reward that differs by prompt, though greedy completions of a random model may not."""
    return float(sum(prompt_ids) % 3)


def options(folder, model, allocation: str, **more) -> GRPOConfig:
    shared = {"enable_offload": True} if "|" in allocation else {}
    return config_from_dict(
        {
            "experiment_name": "turns",
            "trial_name": "t",
            "device": "cpu",
            "allocation_mode": allocation,
            "total_train_steps": 3,
            "cluster": {"fileroot": str(folder)},
            "train_dataset": {"path": "x", "type": "rl", "batch_size": 4},
            "gconfig": {"n_samples": 1, "max_new_tokens": 6, "greedy": True},
            "rollout": {"consumer_batch_size": 4, "max_head_offpolicyness": 0},
            "sglang": {"context_length": 128},
            "actor": {
                "path": str(model),
                "dtype": "float32",
                "optimizer": {"lr": 1e-2, "warmup_steps_proportion": 0.0},
                "ppo_n_minibatches": 2,
                "kl_ctl": 0.0,
                "weight_update_mode": "disk",
                "adv_norm": {"mean_level": "batch", "std_level": "batch"},
            },
            **shared,
            **more,
        },
        GRPOConfig,
    )


@contextmanager
def embedded_server(model, monkeypatch, seen=lambda route: None):
    """An embedded server that samples one row at a time, and calls `seen` with each route."""

    @web.middleware
    async def watch(request, handler):
        if request.method == "POST":
            seen(request.path.removeprefix("/"))
        return await handler(request)

    application = EmbeddedServer(str(model), max_rows=1).application()
    application.middlewares.append(watch)
    http = HttpThread(application, "embedded-server")
    monkeypatch.setenv(ADDRESSES_VARIABLE, f"127.0.0.1:{http.port}")
    try:
        yield
    finally:
        http.close()


def run(config, observe, valid=None, watch=lambda trainer: None) -> None:
    observers = [lambda trainer: (watch(trainer), observe)[1]]
    with PPOTrainer(config, ROWS, valid, observers=observers, print_steps=False) as trainer:
        trainer.train(workflow_kwargs={"reward_fn": by_prompt})


def numbers_of_run(folder, model, allocation, monkeypatch):
    """Return every batch, with its statistics and the checksums of the weights after it."""
    found = []

    def observe(event, **facts):
        if event == "batch":
            found.append(facts["batch"])
        elif event == "step":
            found.append((facts["stats"], facts["checksums"]))

    with embedded_server(model, monkeypatch):
        run(options(folder, model, allocation), observe)
    return found


def without_times(stats: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in stats.items() if not name.startswith("timeperf/")}


def test_turns_give_the_bits_of_separate_devices(tiny_model, tmp_path, monkeypatch):
    apart = numbers_of_run(tmp_path / "apart", tiny_model, "sglang:d1+fsdp:d1", monkeypatch)
    together = numbers_of_run(tmp_path / "together", tiny_model, "sglang:d1|fsdp:d1", monkeypatch)
    assert len(apart) == len(together) == 6
    for one, other in zip(apart[::2], together[::2], strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    for (stats, checksums), (other_stats, other_checksums) in zip(apart[1::2], together[1::2], strict=True):
        assert without_times(stats) == without_times(other_stats)
        assert checksums == other_checksums
    assert len({frozenset(checksums.items()) for _, checksums in apart[1::2]}) == 3  # every step changed them
    versions = [set(batch["versions"][batch["loss_mask"] == 1].tolist()) for batch in together[::2]]
    assert versions == [{0}, {1}, {2}]


@pytest.mark.long
def test_each_side_has_released_its_memory_while_the_other_works(tiny_model, tmp_path, monkeypatch):
    events: list[str] = []
    bytes_at: list[tuple[str, int]] = []  # of the trainer on its device
    trainers: list[PPOTrainer] = []

    def trainer_bytes() -> int:
        actor = trainers[0].actor
        return sum(storage.nbytes() for storage in storages(actor.model, actor.optimizer, actor.ranks.device))

    def seen(route: str) -> None:
        if route not in CONTROL and events[-1:] != [route]:
            events.append(route)
        if trainers and hasattr(trainers[0], "actor"):
            bytes_at.append((route, trainer_bytes()))

    def observe(event, **facts):
        if event in ("batch", "step", "weights"):
            events.append(event)
            bytes_at.append((event, trainer_bytes()))

    config = options(tmp_path, tiny_model, "sglang:d1|fsdp:d1", total_train_steps=2)
    with embedded_server(tiny_model, monkeypatch, seen):
        run(config, observe, watch=trainers.append)

    wake = [
        "resume_memory_occupation",
        "update_weights_from_disk",
        "weights_checker",
        "resume_memory_occupation",
    ]
    first = [route for route in wake if route != "weights_checker"]
    turn = ["generate", "release_memory_occupation", "batch", "step", "weights"]
    names = ["weights_checker", *wake[1:]]  # of the tensors that the server holds
    assert events == ["release_memory_occupation", *first, *turn, wake[0], *names, *turn]
    of_engine = {"resume_memory_occupation", "update_weights_from_disk", "continue_generation", "generate"}
    assert [item for item in bytes_at if item[0] in of_engine and item[1]] == []
    parameters = sum(p.nbytes for p in trainers[0].actor.model.parameters())
    assert [item for item in bytes_at if item[0] == "step" and item[1] < 3 * parameters] == []
    # Before step 0 the weights, before step 1 also two moments of AdamW, each as large.
    offloaded = [step["offloaded_bytes"] for step in read_stats(next(tmp_path.rglob("stats.jsonl")))]
    assert parameters <= offloaded[0] < 2 * parameters < 3 * parameters <= offloaded[1]


def test_a_server_that_does_not_release_its_memory_ends_the_run(
    start_fake, tiny_model, tmp_path, monkeypatch
):
    fake = start_fake()
    fake.server_info |= {"model_path": str(tiny_model)}
    fake.refuse["/release_memory_occupation"] = (400, {"message": "no memory saver"})
    monkeypatch.setenv(ADDRESSES_VARIABLE, fake.server.address)
    config = options(tmp_path, tiny_model, "sglang:d1|fsdp:d1")
    try:
        with pytest.raises(
            SharingFailed, match=r"did not take their turn .*: RequestRefused: .*no memory saver"
        ):
            PPOTrainer(config, ROWS)
    finally:
        leave_ranks()
