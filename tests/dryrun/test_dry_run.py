"""`areal-debug train --dry-run`: what a run would do and need, from its options and local files."""

import json
import socket
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from areal_core.config import OptimizerConfig, PPOConfig, SFTConfig, TrainEngineConfig, load_expr_config
from areal_core.config.allocation import Parallel, parse_allocation
from areal_core.engine.memory_plan import Model, estimate_memory, parse_shape, read_shape, state_parts
from areal_debug.verbs.train import command

HERE = Path(__file__).parent
UPSTREAM = HERE / "upstream"
SCRIPT, TINY = HERE.parent / "debug/train_tiny.py", HERE.parent / "debug/tiny.yaml"
METHODS = {"sft": "SFTConfig", "dpo": "DPOConfig", "rw": "RWConfig"}


@pytest.fixture
def dry_run(monkeypatch, tmp_path):
    """Call the command in this process; every connection is an error.

    `dry_run(config, "seed=2")` returns exit code and output.
    """

    def refuse(*_: object) -> None:
        raise AssertionError("a dry run has opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # set by the verb, and restored after the test

    def call(config: Path, *arguments: object, as_json: bool = True):
        options = ["--dry-run", *(["--json"] if as_json else [])]
        script = SCRIPT
        if (script_method := METHODS.get(config.name.partition("_")[0])) is not None:
            script = written(tmp_path / "train.py", f"load_expr_config(sys.argv, {script_method})")
        argv = [str(script), "--config", str(config), *options, *map(str, arguments)]
        done = CliRunner().invoke(command, argv)
        return done.exit_code, json.loads(done.stdout) if as_json else done.output

    return call


def written(file: Path, text: str) -> Path:
    file.write_text(text)
    return file


def test_the_plan_of_a_tiny_run_is_complete_and_leaves_no_files(dry_run, tiny_model, tmp_path):
    code, run = dry_run(
        TINY,
        *(f"cluster.fileroot={tmp_path}/files", f"actor.path={tiny_model}", "total_train_epochs=2"),
        *(
            "total_train_steps=null",
            "saver.freq_epochs=1",
            "evaluator.freq_secs=60",
            "evaluator.freq_steps=8",
        ),
        *(
            "recover.mode=auto",
            "recover.freq_steps=40",
            "train_dataset.max_length=16",
            "gconfig.max_tokens=24",
        ),
    )
    assert (code, run["would_run"]) == (0, True)
    assert run["allocation"] == "embedded|fsdp:d1"
    assert run["processes"] == [
        {
            "what": "FSDP rank with the embedded engine",
            "count": 1,
            "devices_each": 1,
            "where": "CPU of this machine",
        }
    ]
    assert run["steps"]["num_rows"] == 64
    assert (run["steps"]["per_epoch"], run["steps"]["total"]) == (16, 32)
    assert (
        run["update"]
        == "2 optimizer steps over 16 sequences per rank, in micro-batches of at most 64 tokens; "
        "attention is SDPA, one sequence at a time: no flash-attention on a CPU"
    )
    cache = next(part for part in run["memory"]["rank"] if part["name"] == "key-value cache")
    # 2 layers x (keys, values) x 2 heads x 16 numbers x 4 bytes = 512 a token; 16 sequences of 7 +
    # 8 tokens.
    assert cache["size_bytes"] == 16 * 15 * 512
    assert not (tmp_path / "files").exists()


def test_processes_are_placed_on_machines_and_one_that_is_too_small_is_noted(dry_run):
    code, run = dry_run(UPSTREAM / "gspo_1_0.yaml")
    assert code == 0
    assert [(item["count"], item["devices_each"], item["where"]) for item in run["processes"]] == [
        (2, 2, "machine 1 (of 2, from 0)"),
        (4, 1, "machine 0 (of 2, from 0)"),
    ]
    assert [note for note in run["notes"] if "vllm" in note] == []
    _, run = dry_run(UPSTREAM / "grpo_0_3.yaml", "cluster.n_gpus_per_node=3")
    small = "needs 4 devices on one machine and cluster.n_gpus_per_node is 3"
    assert any(small in note for note in run["notes"])


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["rollout.consumer_batch_size=7"],
            "rollout.consumer_batch_size is 7 and train_dataset.batch_size is 8",
        ),
        (["train_dataset.dataset_kwargs.num_rows=5"], "the run would have 0 steps: the dataset has 5 rows"),
        (["train_dataset.dataset_kwargs.name=main"], "dataset_kwargs has name; 'arithmetic' takes num_rows"),
        (["cluster.n_gpus_per_node=2", "cluster.n_nodes=1", "scheduler.type=slurm"], "cluster.n_nodes = 1"),
        (["stats_logger.trackio.mode=local"], "stats_logger.trackio.mode needs the package trackio"),
        (["enable_offload=true", "total_train_steps=0"], "total_train_steps is 0"),
    ],
)
def test_what_the_run_would_refuse_the_dry_run_refuses_with_code_2(dry_run, monkeypatch, overrides, sentence):
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None
    )  # as where no optional package is installed
    code, refused = dry_run(UPSTREAM / "grpo_0_3.yaml", *overrides)
    assert code == 2
    assert sentence in " ".join(refused["problems"])


def test_states_are_exact_to_the_byte(tiny_model):
    from areal_core.engine.model import load_model

    actor = Model("actor", TrainEngineConfig(path=str(tiny_model), optimizer=OptimizerConfig()), trains=True)
    model = load_model(str(tiny_model))
    optimizer = torch.optim.AdamW(model.parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    tensors = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    real = [
        sum(tensor.nbytes for tensor in group)
        for group in (list(model.parameters()), tensors, [parameter.grad for parameter in model.parameters()])
    ]
    shape = read_shape(actor)
    assert [part.size_bytes for part in state_parts(actor, shape, Parallel())] == real
    halves = [part.size_bytes for part in state_parts(actor, shape, Parallel(2))]
    assert halves == [size // 2 for size in real]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_are_near_what_autograd_keeps(tmp_path, dtype):
    from transformers import Qwen2Config, Qwen2Model

    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3, "vocab_size": 100}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    qwen = Qwen2Config(**sizes, **heads, use_cache=False, attn_implementation="sdpa")
    model = Qwen2Model(qwen).to(getattr(torch, dtype))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = (
            storage.nbytes(),
            tensor,
        )  # kept alive, so that no other object gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(input_ids=torch.arange(512)[None] % 100)
    real = sum(size for address, (size, _) in kept.items() if address not in weights)
    assert output.last_hidden_state.shape == (1, 512, 128)

    qwen.save_pretrained(tmp_path)
    overrides = (f"actor.path={tmp_path}", f"actor.dtype={dtype}", "actor.mb_spec.max_tokens_per_mb=512")
    config, _ = load_expr_config(
        ["--config", str(UPSTREAM / "sft_0_5.yaml"), *overrides, "actor.gradient_checkpointing=false"],
        SFTConfig,
    )
    parts = {part.name: part.size_bytes for part in estimate_memory(config, parse_allocation("fsdp:d4")).rank}
    assert abs(parts["activations"] / real - 1) < 0.2


def test_tensor_parallel_ranks_divide_all_but_norms(dry_run, tiny_model):
    code, run = dry_run(TINY, f"actor.path={tiny_model}", "allocation_mode=embedded|fsdp:d2t2")
    assert code == 0
    (ranks,) = run["processes"]
    assert ranks["count"] == 4
    assert ranks["where"].endswith("; 2 groups of 2 with the same rows: 2 share the layers (t)")
    parts = {part["name"]: part["size_bytes"] for part in run["memory"]["rank"]}
    # Of 129,920 parameters, 320 are of norms, over two ranks; the others are over four.
    assert parts["actor: masters"] == 4 * (129_600 // 4 + 320 // 2)


def test_ranks_that_share_rows_are_reported_and_indivisible_heads_refused(dry_run, tiny_model):
    code, run = dry_run(TINY, f"actor.path={tiny_model}", "allocation_mode=embedded|fsdp:d2c2")
    assert code == 0
    assert [process["count"] for process in run["processes"]] == [4]
    assert "8 sequences per group of 2 ranks, which divide their tokens 2 ways" in run["update"]
    arguments = (f"actor.path={tiny_model}", "allocation_mode=embedded|fsdp:d1c3")
    code, output = dry_run(TINY, *arguments, as_json=False)
    assert code == 2
    assert "the model has 4 attention heads, which c3 x t1 ranks cannot share" in output


def test_memory_of_a_server_is_its_share_of_weights_and_cache(tiny_model):
    config, _ = load_expr_config(
        ["--config", str(UPSTREAM / "gspo_1_0.yaml"), f"actor.path={tiny_model}"], PPOConfig
    )
    memory = estimate_memory(config, parse_allocation("sglang:d2t2+fsdp:d4"))
    weights, cache = memory.server
    assert weights.size_bytes == memory.num_parameters * 2 // 2  # bfloat16 over two devices
    # 32 prompts x 8 samples over 2 servers, 1,024 tokens each; 256 bytes a token in bfloat16, half
    # of them per device.
    assert cache.size_bytes == 128 * 1024 * 128
    assert not any(part.name.startswith("reference") for part in memory.rank)  # kl_ctl is 0: it is not loaded


def test_a_mixture_of_experts_counts_the_experts_that_a_token_visits():
    facts = {
        "num_attention_heads": 4,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 100,
        "intermediate_size": 256,
    }
    experts = {
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    assert parse_shape(facts, 1000, 10, [300, 300]).intermediate == 256
    shape = parse_shape(facts | experts, 1000, 10, [300, 300])
    assert (shape.intermediate, shape.outside_layers, shape.cache_per_token) == (96, 400, 2 * 2 * 2 * 32)


@pytest.mark.parametrize("option", ["actor.path", "tokenizer_path"])
def test_a_model_that_is_not_in_its_folder_is_refused_and_a_name_on_the_hub_is_not(
    dry_run, tiny_model, tmp_path, option, monkeypatch, caplog
):
    (tmp_path / "models").mkdir()
    given = [
        f"cluster.fileroot={tmp_path}/files",
        f"actor.path={tiny_model}",
        f"{option}={tmp_path}/models/typo",
    ]
    code, found = dry_run(TINY, *given)
    assert (code, found["problems"]) == (
        2,
        [
            f"{option}: there is no model at {tmp_path}/models/typo: give a checkpoint folder, or owner/name on the hub"
        ],
    )
    monkeypatch.chdir(tmp_path)
    # no model of the hub lacks an owner
    code, found = dry_run(TINY, *given[:2], f"{option}=modle", "train_dataset.path=rows.jsonl")
    assert (code, len(found["problems"])) == (2, 2)
    assert f"{option}: there is no model at modle" in found["problems"][0]
    assert "train_dataset.path: rows.jsonl does not exist" in found["problems"][1]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, found = dry_run(TINY, *given[:2], "~device", f"{option}=owner/model")
    assert (code, found["processes"][-1]["where"]) == (0, "CPU of this machine, where no GPU is found")
    assert f"there is no folder owner/model here: {option} would be taken from the hub" in caplog.text


def test_a_critic_is_planned_next_to_the_actor(dry_run, tiny_model, tmp_path):
    options = [f"cluster.fileroot={tmp_path}", f"actor.path={tiny_model}", "saver.freq_steps=1"]
    options += ["algorithm=ppo", "critic.ppo_n_minibatches=4", "critic.mb_spec.max_tokens_per_mb=128"]
    _, run = dry_run(TINY, *options)
    sizes = {part["name"]: part["size_bytes"] for part in run["memory"]["rank"]}
    num_parameters = 129_920  # the output layer is the embedding; a head of values adds 64
    assert sizes["actor: masters"] == 4 * num_parameters
    assert sizes["critic: masters"] == sizes["critic: gradients"] == 4 * (num_parameters + 64)
    assert sizes["critic: optimizer"] == 2 * sizes["critic: masters"]
    assert run["update"].startswith(
        "2 optimizer steps over 16 sequences per rank, in micro-batches of at most 64 tokens"
    )


def test_the_example_is_planned_with_the_adapter_that_is_trained(dry_run, tiny_model, tmp_path):
    reference = (f"ref.path={tiny_model}", "ref.mb_spec.max_tokens_per_mb=10240", "actor.kl_ctl=0.1")
    paths = (f"cluster.fileroot={tmp_path}", f"actor.path={tiny_model}")
    code, run = dry_run(HERE.parents[1] / "examples/gsm8k_grpo_lora.yaml", *paths, *reference)
    assert code == 0
    assert run["update"].startswith("1 optimizer step of an adapter of rank 32 over 256 sequences per rank")
    parts = {part["name"]: part["size_bytes"] for part in run["memory"]["rank"]}
    num_parameters = run["memory"]["num_parameters"]
    # Rank 32 on seven layers of 64 and 256 features in each of two blocks, k and v half as wide as q.
    adapter = 2 * 32 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 256))
    assert parts["actor: frozen weights"] == 2 * num_parameters // 4  # bfloat16, over four ranks
    assert [parts[f"actor: {part}"] for part in ("adapter", "optimizer", "gradients")] == [
        adapter // 4 * size for size in (4, 8, 4)
    ]
    assert not any(name.startswith("reference") for name in parts)
