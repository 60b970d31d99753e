"""`areal-debug serve`: start, list, join a run, stop, and reports of dead or failed servers."""

import json
import os
import socket
import urllib.request

import pytest

from areal_core.servers.discovery import FolderNames, discovered_servers, register_server
from areal_debug.serve.facts import parse_facts, worth_checking
from areal_debug.serve.state import ServerState, write_state
from areal_debug.verbs.serve import command
from tests.command_line import invoke


@pytest.fixture
def serve(areal_debug, tmp_path):
    """The verb with a separate state folder; its servers are stopped at teardown."""

    def call(*arguments):
        return areal_debug("serve", *arguments, XDG_STATE_HOME=str(tmp_path / "state"))

    yield call
    call("--stop", "--all")


def test_only_the_named_servers_are_listed_and_stopped_or_those_of_this_folder(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def stop(*arguments, verb="--stop"):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            command.main([verb, *arguments], standalone_mode=False)
        return ended.value.code, "".join(capsys.readouterr()).strip()

    def listed(*arguments):
        code, out = stop("--json", *arguments, verb="--status")
        return code, [server["address"][-5:] for server in json.loads(out)["servers"]]

    for port, folder in ((30001, "/elsewhere"), (30002, str(tmp_path)), (30003, "/elsewhere")):
        write_state(ServerState(f"127.0.0.1:{port}", "sglang", "m", "log", 2**22 + 1, 0.0, folder=folder))
    assert stop("1:30001") == (
        2,
        "Error: there is no server at 1:30001; there are 127.0.0.1:30001, 127.0.0.1:30002, 127.0.0.1:30003",
    )
    assert listed() == (1, ["30002"])
    assert listed("--all") == (1, ["30001", "30002", "30003"])
    assert listed("--port", "30003") == (1, ["30003"])
    assert "2 servers of other folders: --all lists them" in stop(verb="--status")[1]
    assert stop() == (0, "stopped 127.0.0.1:30002")
    code, out = stop()
    assert code == 2
    assert "no server was started in this folder, but 127.0.0.1:30001 (in /elsewhere), 127.0.0.1:30003" in out
    assert stop("127.0.0.1:30003") == (0, "stopped 127.0.0.1:30003")
    assert stop("--all") == (0, "stopped 127.0.0.1:30001")


def test_a_background_server_joins_a_run_answers_is_listed_and_stops(serve, tiny_model, tmp_path):
    names = FolderNames(tmp_path / "names")
    register_server(names, "exp", "trial", "127.0.0.1:1")
    options = ("--backend", "embedded", "--background", "--join", "exp", "--names", names.root)
    done = serve("--model", tiny_model, *options)
    assert done.returncode == 0, done.stderr
    *facts, line = done.stdout.strip().splitlines()
    assert line.startswith("AREAL_LLM_SERVER_ADDRS=127.0.0.1:")
    assert {"context      2,048 tokens", "dtype        float32", "joined       exp/trial"} <= set(facts)
    address = line.partition("=")[2]
    with urllib.request.urlopen(f"http://{address}/model_info") as reply:
        assert json.load(reply)["model_path"] == str(tiny_model)
    assert address in {server.address for server in discovered_servers(names, "exp", "trial").values()}
    status = serve("--status", "--json")
    (server,) = json.loads(status.stdout)["servers"]
    assert (status.returncode, server["now"], server["run"]) == (0, "ready", "exp/trial")
    health = server["health"]
    assert 0 < health.pop("answer_ms") < 5000
    assert health == {"healthy": True, "weight_version": "default", "running": 0, "waiting": 0}
    assert "  default  0 running, 0 waiting  exp/trial" in serve("--status").stdout
    assert (
        os.getsid(server["keeper_pid"]) == server["keeper_pid"]
    )  # a separate session: it outlives the shell
    taken = serve("--model", tiny_model, "--backend", "embedded", "--port", address.partition(":")[2])
    assert taken.returncode == 2
    assert "by our own server of" in taken.stderr
    stopped = serve("--stop")
    assert (stopped.returncode, stopped.stdout.strip()) == (0, f"stopped {address}")
    assert address not in {server.address for server in discovered_servers(names, "exp", "trial").values()}
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(address.partition(":")[2])))
    assert serve("--status").returncode == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "--model is missing"),
        (["--model", "/nowhere"], "there is no model at /nowhere"),
        (["--model", "{folder}"], "has no config.json"),
        (["--model", "{folder}/file"], "is a file: give the folder"),
        (["--model", "a/b/c"], "there is no model at a/b/c"),
        (["--model", "{model}", "--join", "a/b/c"], "give EXPERIMENT or EXPERIMENT/TRIAL"),
        (["--model", "{model}", "--join", "exp", "--names", "{folder}"], "'exp' has no servers yet"),
        (["--model", "{model}", "--port", "{port}"], "Address already in use, by process"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_starts(
    arguments, sentence, tiny_model, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        places = {"folder": folder, "model": tiny_model, "port": taken.getsockname()[1]}
        filled = [argument.format(**places) for argument in arguments]
        done = invoke("serve", "--backend", "embedded", *filled)
    assert done.exit_code == 2
    assert sentence in done.output
    assert not list(tmp_path.glob("state/**/*.log"))


def test_settings_that_surprise_are_pointed_out(tmp_path):
    config = {"dtype": "float32", "max_position_embeddings": 4096, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9, "eos_token_id": 2}')
    server = {
        "version": "0.5.23",
        "context_length": 2048,
        "dtype": "bfloat16",
        "sampling_defaults": "model",
        "chunked_prefill_size": 8192,
    }
    model = {"model_path": str(tmp_path), "weight_version": "default", "has_image_understanding": False}
    notes = worth_checking(parse_facts("127.0.0.1:1", server, model))
    expected_words = (
        "temperature 0.6, top_p 0.9",
        "2,048",
        "stored as float32 and served as bfloat16",
        "images",
        "8,192",
    )
    assert len(notes) == len(expected_words)
    assert [words in note for words, note in zip(expected_words, notes, strict=True)] == [True] * len(
        expected_words
    )
    quiet = {**server, "context_length": 4096, "dtype": "float32", "sampling_defaults": "openai"}
    seeing = {**model, "has_image_understanding": True}
    assert worth_checking(parse_facts("x:1", quiet | {"chunked_prefill_size": -1}, seeing)) == []


@pytest.mark.long
@pytest.mark.sglang
def test_a_real_sglang_server_is_read_back_and_outlives_the_command(serve, tiny_model):
    done = serve("--model", tiny_model, "--background", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["server"]["version"] == "sglang 0.5.23"
    assert (facts["server"]["dtype"], facts["server"]["context_length"]) == ("float32", 2048)
    assert facts["server"]["multimodal"] is False
    with urllib.request.urlopen(f"http://{facts['address']}/health") as reply:
        assert reply.status == 200
