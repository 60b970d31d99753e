"""Servers that run already: training and rollouts use them, start none and leave them running."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import torch

from areal_core import RemoteEngine
from areal_core.config import GRPOConfig, load_expr_config
from areal_core.errors import ConfigError
from areal_core.paths import run_folder
from areal_core.rollout.errors import NoServers, WrongServer
from areal_core.rollout.http_thread import HttpThread
from areal_core.rollout.types import ModelRequest, sampling_from
from areal_core.rollout.workflow import episode_tensors, prompt_tokens
from areal_core.servers.server import Server, call
from areal_core.testing import make_tiny_model
from areal_core.testing.embedded_server import EmbeddedServer
from areal_debug.trace.read import read_run
from tests.command_line import invoke

HERE = Path(__file__).parent
ROWS = [{"messages": [{"role": "user", "content": f"{n}?"}], "answer": str(n)} for n in range(3)]


@pytest.fixture(scope="module")
def server(tiny_model):
    http = HttpThread(EmbeddedServer(str(tiny_model)).application(), "server")
    yield Server(f"127.0.0.1:{http.port}")
    http.close()


def weights_of(server: Server) -> str:
    return json.loads(call(server, "GET", "/model_info"))["weight_version"]


@pytest.mark.parametrize(
    ("addresses", "options", "sentence"),
    [
        ("{server}", ["allocation_mode=sglang:d2+fsdp:d1"], "names 1 inference servers and the allocation"),
        ("127.0.0.1:9,{server}", [], "no inference server answers at 127.0.0.1:9, which AREAL_LLM_SERVER_ADDRS names"),
        ("nowhere", [], "AREAL_LLM_SERVER_ADDRS: 'nowhere' is not an address of an inference server"),
        ("{server}", ["actor.path={other}"], "with hidden_size 64, and the run trains"),
        ("{server}", ["allocation_mode=sglang:d1t2+fsdp:d1"], "give an allocation with t1"),
    ],
)  # fmt: skip
def test_servers_that_cannot_be_used_are_refused_before_a_rank_starts(
    addresses, options, sentence, server, tiny_model, tmp_path, monkeypatch, capfd
):
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"hidden_size": 32}))
    monkeypatch.setenv("AREAL_LLM_SERVER_ADDRS", addresses.format(server=server.address))
    given = [f"cluster.fileroot={tmp_path}", f"actor.path={tiny_model}", "allocation_mode=fsdp:d1"]
    given += [option.format(other=other) for option in options]
    script = [str(HERE / "train_tiny.py"), "--config", str(HERE / "tiny.yaml")]
    done = invoke("train", *script, *given)
    assert done.exit_code == 2
    assert sentence in done.output + capfd.readouterr().err
    assert not list(tmp_path.glob("logs/**/trainer.log"))


class Counting:
    """The reward is the number of sampled tokens."""

    built = 0

    def __init__(self, gconfig, tokenizer):
        self.sampling, self.tokenizer = sampling_from(gconfig, n_samples=1), tokenizer
        Counting.built += 1

    async def arun_episode(self, engine, data):
        prompt = prompt_tokens(self.tokenizer, data["messages"], {})
        response = await engine.agenerate(ModelRequest(input_ids=prompt, sampling=self.sampling))
        return episode_tensors(response, float(len(response.output_tokens)))


class Agent:
    async def run(self, data, **extra):
        body = {"model": "m", "messages": data["messages"]}
        headers = {"Authorization": f"Bearer {extra['api_key']}"}
        reply = await extra["http_client"].post(
            f"{extra['base_url']}/chat/completions", json=body, headers=headers
        )
        return float(reply.status_code == 200)


@pytest.fixture
def config(tiny_model, tmp_path):
    file = tmp_path / "rollout.yaml"
    file.write_text(
        f"actor: {{path: {tiny_model}}}\ncluster: {{fileroot: {tmp_path}}}\ngconfig: {{n_samples: 2, max_new_tokens: 4}}\n"
    )
    names = f"cluster.name_resolve.nfs_record_root={tmp_path}"
    return load_expr_config(["--config", str(file), names], GRPOConfig, role="rollout")[0]


def test_a_script_rolls_out_without_trainer_and_process_group(server, config, monkeypatch):
    monkeypatch.setenv("AREAL_LLM_SERVER_ADDRS", server.address)
    config.rollout.enable_rollout_tracing = True
    version, Counting.built = int(weights_of(server).replace("default", "0")), 0
    with RemoteEngine(config) as engine:
        batch = engine.rollout_batch(ROWS, workflow=Counting)
        assert batch["prompt_id"].tolist() == [0, 0, 1, 1, 2, 2]
        trained = batch["loss_mask"] == 1
        assert batch["rewards"].tolist() == trained.sum(1).tolist()
        assert set(batch["versions"][trained].tolist()) == {version}
        for row in ROWS:
            engine.submit(row, Counting, group_size=1)
        assert [len(rows["rewards"]) for rows in engine.wait(3)] == [1, 1, 1]
        assert Counting.built == 1
        config.train_dataset.batch_size = 2
        engine.pause()
        engine.resume()
        first = engine.prepare_batch(ROWS, Counting, should_accept=lambda rows: rows["prompt_id"][0] != 0)
        assert first["prompt_id"].unique().tolist() == [1, 2]  # the rejected one is replaced
        assert engine.prepare_batch(ROWS, Counting)["prompt_id"].unique().tolist() == [3, 4]
        assert engine.rollout_batch(ROWS, Agent, group_size=1)["rewards"].tolist() == [1, 1, 1]
        request = ModelRequest(input_ids=[1, 2], sampling=sampling_from(config.gconfig, n_samples=1))
        assert 1 <= len(asyncio.run(engine.agenerate(request)).output_tokens) <= 4
    trace = read_run(run_folder(config, "logs"))
    assert (trace.file.parent.name, {one.status for one in trace.episodes}) == ("rollout_trace", {"accepted"})
    assert not torch.distributed.is_initialized()
    assert weights_of(server)  # it is still running


def test_addresses_may_be_given_and_must_hold_the_same_weights(config, tiny_model, tmp_path):
    engine = RemoteEngine(config)
    with pytest.raises(ConfigError, match=r"call connect\(\)"):
        engine.wait(1)
    with pytest.raises(NoServers, match="no inference server is known"):
        engine.connect()
    https = [HttpThread(EmbeddedServer(str(tiny_model)).application(), "server") for _ in range(2)]
    try:
        both = ",".join(f"127.0.0.1:{http.port}" for http in https)
        with RemoteEngine(config, both) as engine:
            assert len(engine.rollout_batch(ROWS, Counting)["rewards"]) == 6
        payload = {"model_path": str(tiny_model), "weight_version": "7"}
        call(Server(both.split(",")[1]), "POST", "/update_weights_from_disk", payload)
        with pytest.raises(WrongServer, match=r"different weights .*version default, .*version 7"):
            RemoteEngine(config, both).connect()
        with RemoteEngine(config, [both.split(",")[1]]) as engine:
            rows = engine.rollout_batch(ROWS, Counting)
            assert set(rows["versions"][rows["loss_mask"] == 1].tolist()) == {7}
            assert engine.config is config
        config.actor.path = str(make_tiny_model(tmp_path / "other", seed=1, hidden_size=32))
        with pytest.raises(WrongServer, match="hidden_size 64, and the run trains"):
            RemoteEngine(config, both).connect()
    finally:
        for http in https:
            http.close()
