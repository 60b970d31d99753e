"""Cost of the engine compared with a bare PyTorch loop on the same model, micro-batches and loss.

    python -m benchmarks.train_step [--ranks 2] [--rounds 6] [--hidden 256] [--layers 12]
                                    [--vocabulary 4096] [--tokens 512] [--cross-entropy]
                                    [--device cpu]

Both train under FSDP2, in turn. The bare loop gets packed micro-batches, computes logprobs and
entropies, as losses of policy optimization need them, from all logits at once, and reads back only
the gradient norm; with --cross-entropy it uses PyTorch's, without entropies. The engine starts from
padded rows, divides and packs them, computes logprobs and entropies a chunk at a time, and reports
losses and weights of every micro-batch. To save memory its backward pass computes logits again, a
third of the output layer's work. That layer has a tenth of this model's weights, as in models of a
few billion parameters; where its share is larger, so is the cost.

Ratios are of consecutive steps; their median is printed. Ratios of CPU time also hold on a busy
machine, where wall time includes waiting.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from areal_core.config import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from areal_core.data.batch import Batch, pack, select_rows, sequence_lengths
from areal_core.engine.attention import PACKED
from areal_core.engine.fsdp import FSDPEngine
from areal_core.engine.model import load_model
from areal_core.engine.ranks import Ranks, join_ranks, leave_ranks
from areal_core.trainer.build import build_engine
from benchmarks.harness import Seconds, read_options, report, say, torchrun

OPTIMIZER = OptimizerConfig(lr=1e-4, warmup_steps_proportion=0.0)


@dataclass(frozen=True)
class Packed:
    """A micro-batch that is ready for the model."""

    inputs: dict[str, object]
    labels: Tensor  # int64 [tokens], -100 outside of the loss mask


def make_model(folder: Path, options: argparse.Namespace) -> Path:
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=max(1, options.hidden // 128),
        tie_word_embeddings=True,
        dtype="float32",
    )
    torch.manual_seed(0)
    transformers_logging.disable_progress_bar()
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_rows(lengths: list[int], vocabulary: int, seed: int) -> Batch:
    """Return next-token aligned rows; every token but the first is in the loss mask."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.tensor(lengths)[:, None]
    positions = torch.arange(max(lengths))
    ids = torch.randint(vocabulary, (len(lengths), max(lengths)), generator=generator, dtype=torch.int32)
    mask = positions < counts
    return {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "loss_mask": (positions < counts - 1).int(),
    }


def make_engine(ranks: Ranks, model: str, max_tokens: int) -> FSDPEngine:
    spec = MicroBatchSpec(max_tokens_per_mb=max_tokens)
    options = TrainEngineConfig(path=model, dtype="float32", mb_spec=spec, optimizer=OPTIMIZER)
    return build_engine(options, ranks, total_steps=1000)


def engine_step(engine: FSDPEngine, batch: Batch) -> float:
    """Take a step of maximum likelihood with the engine; return its gradient norm."""
    result = engine.train_batch(
        batch,
        lambda logprobs, entropies, flat: -(logprobs * flat["loss_mask"]).sum(),
        lambda part: part["loss_mask"].sum(),
    )
    return result.grad_norm


def make_bare(ranks: Ranks, path: str, attention: str) -> tuple[LlamaForCausalLM, torch.optim.Optimizer]:
    model = load_model(path, attn_implementation=attention).to(ranks.device)
    for layer in model.model.layers:
        fully_shard(layer, mesh=ranks.shard_mesh)
    fully_shard(model, mesh=ranks.shard_mesh)
    betas = (OPTIMIZER.beta1, OPTIMIZER.beta2)
    decay = OPTIMIZER.weight_decay
    adam = torch.optim.AdamW(
        model.parameters(), lr=OPTIMIZER.lr, betas=betas, eps=OPTIMIZER.eps, weight_decay=decay, fused=True
    )
    return model, adam


def ready(batch: Batch, micro_batches: list[list[int]], device: torch.device) -> list[Packed]:
    """Return the packed micro-batches of a batch, in the form of the bare loop."""
    found = []
    for rows in micro_batches:
        part = select_rows(batch, rows)
        flat, lengths = pack(part), sequence_lengths(part).tolist()
        ids = flat["input_ids"].long().to(device)
        positions = torch.cat([torch.arange(n) for n in lengths]).to(device)
        inputs = {"input_ids": ids[None], "position_ids": positions[None], "sequence_lengths": lengths}
        found.append(Packed(inputs, ids.roll(-1).masked_fill(flat["loss_mask"].to(device) == 0, -100)))
    return found


def with_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """Return minus the sum of logprobs; computes entropies, too; logits [tokens, vocabulary]."""
    log_p = torch.log_softmax(logits.float(), -1)
    with torch.no_grad():
        _ = -(log_p.exp() * log_p).sum(-1)
    is_trained = labels >= 0
    return -(log_p.gather(1, labels.clamp(min=0)[:, None])[:, 0] * is_trained).sum()


def without_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the same by PyTorch's cross-entropy."""
    return cross_entropy(logits.float(), labels, ignore_index=-100, reduction="sum")


def bare_step(
    model: LlamaForCausalLM,
    adam: torch.optim.Optimizer,
    micro_batches: list[Packed],
    scale: float,
    loss_of: Callable[[Tensor, Tensor], Tensor],
) -> float:
    """Take the same step without the engine; return its gradient norm."""
    model.train()
    for micro in micro_batches:
        logits = model(**micro.inputs, use_cache=False).logits.flatten(0, -2)
        (loss_of(logits, micro.labels) * scale).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.gradient_clipping)
    adam.step()
    adam.zero_grad()
    return float(norm.full_tensor())


def seconds(ranks: Ranks, work: Callable[[], float]) -> Seconds:
    """Return wall seconds, until the last rank is done, and CPU seconds of this process."""
    ranks.barrier()
    clock, busy = time.perf_counter(), time.process_time()
    work()
    busy = time.process_time() - busy
    ranks.barrier()
    return time.perf_counter() - clock, busy


def pairs_in_turn(
    ranks: Ranks, first: Callable[[], float], second: Callable[[], float], rounds: int
) -> list[tuple[Seconds, Seconds]]:
    """Return the (wall, CPU) seconds of the first and the second, in pairs of alternating order."""
    pairs = []
    for number in range(rounds):
        order = [first, second] if number % 2 else [second, first]
        times = {work: seconds(ranks, work) for work in order}
        pairs.append((times[first], times[second]))
    return pairs


def measure(options: argparse.Namespace) -> None:
    ranks = join_ranks(options.device)
    torch.set_num_threads(1)
    lengths = [options.tokens // 8 * share for share in (1, 3, 2, 2, 4, 1, 2, 1)]  # two micro-batches
    batch = make_rows(lengths, options.vocabulary, seed=ranks.rank)
    engine = make_engine(ranks, options.model, options.tokens)
    model, adam = make_bare(ranks, options.model, PACKED)
    packed = ready(batch, engine.divide(batch), ranks.device)
    num_tokens = int(batch["loss_mask"].sum()) * ranks.world_size
    scale = ranks.world_size / num_tokens
    loss_of = without_entropies if options.cross_entropy else with_entropies

    def ours() -> float:
        return engine_step(engine, batch)

    def bare() -> float:
        return bare_step(model, adam, packed, scale, loss_of)

    norms = [(ours(), bare()) for _ in range(2)]  # a warm-up, and a check that both take the same step
    pairs = pairs_in_turn(ranks, ours, bare, options.rounds)
    if ranks.rank == 0:
        print(
            f"{ranks.world_size} rank(s), {len(packed)} micro-batches of {options.tokens} tokens, hidden {options.hidden}, "
            f"{options.layers} layers, vocabulary {options.vocabulary:,}; gradient norms "
            + ", ".join(f"{a:.6f} and {b:.6f}" for a, b in norms)
        )
        say("engine to bare loop", pairs)
        engine_s, bare_s = ([times[1] for times in side] for side in zip(*pairs, strict=True))
        what = f"a training step, {ranks.world_size} rank{'s' if ranks.world_size > 1 else ''}"
        report(what, "a bare FSDP2 loop", "CPU s", engine_s, bare_s)
    leave_ranks()


def main() -> None:
    options = read_options(
        __doc__,
        ranks=1,
        rounds=6,
        hidden=256,
        layers=12,
        vocabulary=4096,
        tokens=512,
        cross_entropy=False,
        device=("cpu", "cuda"),
        model="",
    )
    if options.model:
        measure(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model", options)
        arguments = [*sys.argv[1:], f"--model={model}"]
        print(torchrun("train_step", options.ranks, *arguments).stdout, end="")


if __name__ == "__main__":
    main()
