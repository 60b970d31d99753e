"""The groups of checks of `python -m tests.gpu`: each prints rows, and goes on behind a failure."""

import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from areal_core.config import GRPOConfig, MicroBatchSpec, TrainEngineConfig, load_expr_config
from areal_core.config.allocation import parse_allocation
from areal_core.engine.attention import FLASH
from areal_core.engine.fsdp import FSDPEngine
from areal_core.engine.memory_plan import estimate_memory
from areal_core.engine.parity import measure_parity
from areal_core.engine.ranks import Ranks, join_ranks, leave_ranks
from areal_core.testing import likelihood_with_entropy, make_tiny_model
from areal_core.trainer.build import build_engine
from benchmarks import learning_methods as learning
from benchmarks import model_families, train_step, trees
from tests.gpu.row import failing, say

FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2"),
    *("gemma3_text", "phi3", "olmo2", "glm4", "mixtral", "gpt2"),
)
TINY, SCRIPT = "tests/debug/tiny.yaml", "tests/debug/train_tiny.py"
SPIN = """
import sys, torch
torch.zeros(1, device="cuda")
if sys.argv[1] == "kernel":
    torch.cuda._sleep(1 << 50)
else:
    waiting, event = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(1 << 50)
        event.record()
    waiting.wait_event(event)
    torch.cuda.set_stream(waiting)
print("started", flush=True)
torch.cuda.current_stream().synchronize()
"""


# The script of the tiny run, with next to no memory.
LIMITED = f"""
import runpy, torch
torch.cuda.set_per_process_memory_fraction(1e-5)
runpy.run_path({SCRIPT!r}, run_name="__main__")
"""


def check_environment(device: str, folder: Path) -> None:
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, Transformers {transformers.__version__}"
    say("versions", True, versions)
    if device == "cpu":
        say("card", "not measurable", "--device cpu")
        return
    with failing("card"):
        card = torch.cuda.get_device_properties(0)
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        size = f"{card.total_memory / 2**30:.0f} GiB, compute capability {card.major}.{card.minor}"
        say("card", True, f"{torch.cuda.device_count()} x {card.name}, {size}, NCCL {nccl}")


def check_parity(device: str, folder: Path) -> None:
    """Training computes a model's own log-probs: families x dtypes x attention."""
    ranks = join_ranks(device)
    for family in FAMILIES:
        with failing(f"parity of {family}"):
            model_families.write_tiny(family, str(folder / family))
            found, is_equal = [], True
            for dtype, attention in (
                ("float32", "sdpa"),
                ("bfloat16", "sdpa"),
                ("bfloat16", "flash_attention_2"),
            ):
                config = TrainEngineConfig(path=str(folder / family), dtype=dtype, attn_impl=attention)
                engine = build_engine(config, ranks, total_steps=1)
                parity = measure_parity(engine)
                is_equal &= parity.is_equal
                kernel = "flash" if engine.model.config._attn_implementation == FLASH else "sdpa"
                rows = "" if parity.packs_rows else " one row at a time"
                found.append(f"{dtype} {kernel} {parity.packed_difference:.1e}{rows}")
            say(f"parity of {family}", is_equal, "; ".join(found))
    leave_ranks()


def check_learning(device: str, folder: Path) -> None:
    """SFT, GRPO, PPO with a critic and DPO learn a small task."""
    with failing("teacher"):
        learning.teach(folder, device=device)
    for method in (learning.SFT, learning.GRPO, learning.PPO, learning.DPO):
        with failing(f"learning: {method.title}"):
            curve = learning.learn(learning.on(method, device), folder)
            first, last = curve[0][1], curve[-1][1]
            what = f"{method.measure}: {first:.3f}, after {curve[-1][0]} steps {last:.3f}"
            say(f"learning: {method.title}", last >= first + method.margin, what)


def command(*arguments: object) -> tuple[int, str, str]:
    """Run `areal-debug`; return its exit code and what it printed."""
    call = [sys.executable, "-m", "areal_debug", *map(str, arguments)]
    done = subprocess.run(call, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def facts(*arguments: object) -> tuple[int, Any]:
    """Run a verb; return its exit code and facts. Raises RuntimeError with its sentence."""
    code, out, errors = command(*arguments, "--json")
    if not out.startswith("{"):
        raise RuntimeError((errors.strip().splitlines() or ["it printed nothing"])[-1])
    return code, json.loads(out)


def tiny_run(device: str, folder: Path) -> tuple[object, ...]:
    """Return the words of `areal-debug` that train a tiny model for three steps."""
    model = make_tiny_model(folder / "model")
    return ("train", SCRIPT, "--config", TINY, f"device={device}", f"actor.path={model}")


def record_and_replay(record: Path, *words: object) -> list[bool]:
    """Record a run and replay it; return for each step whether all bits are equal."""
    own = (f"cluster.fileroot={record}-run", f"trial_name={record.name}")
    code, _, errors = command(*words, *own, "--dump-rollout", record)
    if code:
        raise RuntimeError(f"the run ended with {code}: {errors.strip().splitlines()[-1]}")
    return [step["identical"] for step in facts("replay", record)[1]["steps"]]


def check_replay(device: str, folder: Path) -> None:
    """Record and replay to the same bits; engine against model; certificate; out of memory."""
    train = tiny_run(device, folder)
    for name, options in (
        ("float32, deterministic", ("deterministic=true",)),
        ("bfloat16, deterministic", ("deterministic=true", "actor.dtype=bfloat16")),
        ("bfloat16, not deterministic", ("actor.dtype=bfloat16",)),
    ):
        with failing(f"replay: {name}"):
            steps = record_and_replay(folder / name.replace(", ", "-").replace(" ", "-"), *train, *options)
            what = f"{sum(steps)} of {len(steps)} steps bit-identical"
            say(f"replay: {name}", all(steps) or "not" in name, what)
    with failing("consistency of the embedded engine"):
        record = folder / "bfloat16-deterministic"
        code, found = facts("consistency", record, "--device", device)
        what = (
            f"{found['verdict']}, mean |D| {found['metrics']['mean_abs']:.1e} of {found['num_tokens']} tokens"
        )
        say("consistency of the embedded engine", code == 0, what)
    if device == "cuda":
        say("certificate", "not measurable", "attn_impl=batch_invariant is of a CPU")
        with failing("out of memory"):
            script = folder / "limited.py"
            script.write_text(LIMITED)
            code, _, errors = command("train", script, *train[2:], f"cluster.fileroot={folder}/limited")
            lines = [line for line in errors.splitlines() if "memory is full" in line]
            said = (lines or errors.strip().splitlines() or [""])[0][:200]
            say("out of memory", code == 1 and bool(lines) and "Traceback" not in errors, said)
        return
    say("out of memory", "not measurable", "--device cpu")
    with failing("certificate"):
        exact = (
            "consistency",
            "--exact",
            "--engine",
            "embedded",
            "--model",
            folder / "model",
            "--tokens",
            2000,
        )
        code, out, errors = command(*exact)
        say("certificate", code == 0, (out.strip().splitlines() or errors.strip().splitlines())[0][:200])


def check_engine(device: str, folder: Path) -> None:
    """Trees against packed rows, offloading, and peak memory beside the dry run's estimate."""
    ranks = join_ranks(device)
    options = make_sizes(device)
    model = str(train_step.make_model(folder / "model", options))
    for dtype, limit in (("float32", 1e-4), ("bfloat16", 5e-2)):
        with failing(f"tree training, {dtype}"):
            options.model, options.dtype = model, dtype
            engine = trees.make_engine(ranks, options)
            batch = trees.make_rows(options, options.vocabulary)
            tree, packed = (trees.gradients(engine, batch, way) for way in ("tree", "packed"))
            pairs = zip(tree[0], packed[0], strict=True)
            apart = max(float((one - other).norm() / other.norm()) for one, other in pairs)
            tokens = f"{tree[1]:,} tokens for {packed[1]:,}"
            say(
                f"tree training, {dtype}",
                apart < limit,
                f"gradients differ by {apart:.1e} from packed; {tokens}",
            )
    with failing("offloading"):
        norms = []
        for offload in (False, True):
            config = TrainEngineConfig(
                path=model, dtype="bfloat16", mb_spec=MicroBatchSpec(max_tokens_per_mb=4096)
            )
            config.optimizer = replace(train_step.OPTIMIZER, offload=offload and device == "cuda")
            engine = build_engine(config, ranks, total_steps=9)
            batch = trees.make_rows(options, options.vocabulary)
            norms.append([trees.step(engine, batch, "packed") for _ in range(3)])
        if device == "cpu":
            say("offloading", "not measurable", "--device cpu")
        else:
            say(
                "offloading",
                norms[0] == norms[1],
                f"gradient norms of three steps: {norms[0]} and {norms[1]}",
            )
    with failing("memory of a step"):
        measure_memory(ranks, device, model, options)
    say(
        "sleeping servers",
        "not measurable",
        "needs SGLang beside the script: tests/debug/test_with_server.py",
    )
    leave_ranks()


def make_sizes(device: str) -> Any:
    """Return the sizes of a model, and of the rows of `trees`: small on a CPU."""
    import argparse

    is_cpu = device == "cpu"
    return argparse.Namespace(
        hidden=128 if is_cpu else 1024,
        layers=2 if is_cpu else 12,
        vocabulary=512 if is_cpu else 32768,
        tokens=4096,
        prompt=64 if is_cpu else 512,
        samples=8,
        completion=16 if is_cpu else 128,
        turns=1,
        groups=2,
    )


def measure_memory(ranks: Ranks, device: str, model: str, options: Any) -> None:
    """Compare the peak of a step with the sum of the dry run's parts."""
    if device == "cpu":
        say(
            "memory of a step",
            "not measurable",
            "--device cpu; tests/dryrun/test_dry_run_memory.py measures it there",
        )
        return
    given = [
        "--config",
        TINY,
        "device=cuda",
        f"actor.path={model}",
        "actor.dtype=bfloat16",
        "cluster.fileroot=/tmp",
    ]
    given += [f"actor.mb_spec.max_tokens_per_mb={options.tokens}", "gconfig.max_new_tokens=512"]
    config, _ = load_expr_config(given, GRPOConfig)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    engine: FSDPEngine = build_engine(config.actor, ranks, total_steps=9)
    batch = trees.make_rows(options, options.vocabulary)
    for _ in range(2):
        engine.train_batch(batch, likelihood_with_entropy, trees.num_trained)
    peak = torch.cuda.max_memory_allocated() - before
    memory = estimate_memory(config, parse_allocation("embedded|fsdp:d1"), options.prompt)
    parts = {part.name: part.size_bytes for part in memory.rank}
    estimate = sum(
        size for name, size in parts.items() if name not in ("engine's weights", "key-value cache")
    )
    what = f"peak {peak / 2**20:.0f} MiB, dry run {estimate / 2**20:.0f} MiB"
    say("memory of a step", 0.5 < estimate / peak < 2, f"{what}, {estimate / peak:.2f} of the peak")


def check_cost(device: str, folder: Path) -> None:
    """A step beside a bare FSDP2 loop, the sampler beside Transformers, as ratios."""
    sizes = make_sizes(device)
    sizes = [f"--{name}={getattr(sizes, name)}" for name in ("hidden", "layers", "vocabulary", "tokens")]
    with failing("a step beside a bare FSDP2 loop"):
        out = benchmark("train_step", *sizes, f"--device={device}")
        [ratio] = re.findall(r"engine to bare loop, wall time: (.*)", out)
        say("a step beside a bare FSDP2 loop", True, f"{ratio} of its wall time")
    with failing("the embedded sampler beside generate"):
        model = make_tiny_model(folder / "tiny")
        found = json.loads(benchmark("decoding", f"--model={model}", f"--device={device}", "--tokens=128"))
        say("the embedded sampler beside generate", True, f"{found['ratio']} times the tokens per second")


def benchmark(name: str, *arguments: str) -> str:
    call = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    done = subprocess.run(call, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return done.stdout


def check_ranks(device: str, folder: Path) -> None:
    """A collective and a recorded, replayed run on one and on two ranks."""
    for num_ranks in (1, 2):
        name = f"{'NCCL' if device == 'cuda' else 'gloo'} on {num_ranks} rank{'s' * (num_ranks > 1)}"
        if device == "cuda" and torch.cuda.device_count() < num_ranks:
            say(name, "not measurable", f"{torch.cuda.device_count()} GPU")
            continue
        with failing(name):
            ranks = f"allocation_mode=embedded|fsdp:d{num_ranks}"
            steps = record_and_replay(
                folder / f"r{num_ranks}", *tiny_run(device, folder), ranks, "deterministic=true"
            )
            say(name, all(steps), f"{sum(steps)} of {len(steps)} steps bit-identical in a replay")


def check_hang(device: str, folder: Path) -> None:
    """A kernel that never ends, and a stream that waits for it, as `hang` sees them."""
    program = folder / "spin.py"
    program.write_text(SPIN)
    for kind in ("kernel", "stream"):
        name = f"hang: a {kind} that never ends" if kind == "kernel" else "hang: a stream that waits"
        if device == "cpu":
            say(name, "not measurable", "--device cpu")
            continue
        with failing(name):
            call = [sys.executable, str(program), kind]
            rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
            process = subprocess.Popen(call, stdout=subprocess.PIPE, text=True, env=os.environ | rank)
            try:
                assert process.stdout is not None
                process.stdout.readline()
                time.sleep(2)
                code, found = facts("hang", "--pid", process.pid)
                what = f"{found['label']}, {found['confidence']} confidence: {found['summary'][:120]}"
                say(name, found["label"] != "straggler_or_not_hung" and code in (1, 2), what)
            finally:
                process.send_signal(signal.SIGKILL)
                process.wait()


CHECKS: dict[str, Callable[[str, Path], None]] = {
    "environment": check_environment,
    "parity": check_parity,
    "learning": check_learning,
    "replay": check_replay,
    "engine": check_engine,
    "cost": check_cost,
    "ranks": check_ranks,
    "hang": check_hang,
}
