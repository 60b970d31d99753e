"""Sampling in the trainer's process: our decode loop compared with Transformers' `generate`.

    python -m benchmarks.decoding --model FOLDER [--prompts 4] [--samples 4] [--tokens 64]
                                  [--rounds 3] [--threads 1] [--turns 1]
                                  [--prompt-tokens 256] [--device cpu]

The same bfloat16 weights, prompts and number of tokens, at temperature 1, in turn in one process.
Ours also returns each token's logprob. `python examples/smollm2.py FOLDER` writes such a model.
Prints medians of tokens per CPU second (on a GPU per second) and their ratio as one JSON line.

With --turns N the samples are episodes of N calls, each call after the history and a reply of
--tokens random tokens, in float32; ours with its prefix cache is compared with ours without it.
"""

import argparse
import json
import statistics
from functools import partial

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_core.data import arithmetic_rows
from areal_core.embedded.generate import generate, left_pad
from areal_core.embedded.replica import Replica
from areal_core.rollout.types import Sampling
from benchmarks.harness import cpu_seconds, in_turn, read_options, spread, wall_seconds


def measure_turns(o: argparse.Namespace) -> None:
    """Print CPU seconds of episodes with and without the prefix cache, and their ratios."""
    sampling, generator = Sampling(max_new_tokens=o.tokens, ignore_eos=True), torch.Generator().manual_seed(0)
    ways = {
        "cached": Replica(o.model, torch.float32, torch.device("cpu")),
        "read_again": Replica(o.model, torch.float32, torch.device("cpu"), prefix_cache_bytes=0),
    }
    vocabulary = ways["cached"].model.config.vocab_size
    prompts = torch.randint(vocabulary, (o.prompts, o.prompt_tokens), generator=generator).tolist()
    replies = torch.randint(vocabulary, (o.turns, o.tokens), generator=generator).tolist()

    def episodes(replica: Replica) -> None:
        replica.prefixes.clear()
        rows = [list(prompt) for prompt in prompts for _ in range(o.samples)]
        for reply in replies:
            seeds, options = list(range(len(rows))), [sampling] * len(rows)
            found = generate(replica, rows, options, [o.tokens] * len(rows), seeds, vocab_size=vocabulary)
            rows = [row + completion.tokens + reply for row, completion in zip(rows, found, strict=True)]

    works = {name: partial(episodes, way) for name, way in ways.items()}
    taken = in_turn(works, o.rounds + 1, cpu_seconds)
    medians = {f"{name}_s": round(statistics.median(seconds[1:]), 2) for name, seconds in taken.items()}
    ratios = spread(again / cached for cached, again in list(zip(*taken.values(), strict=True))[1:])
    print(json.dumps(medians | {"ratio": [round(ratio, 2) for ratio in ratios]}))


def main() -> None:
    sizes = {"prompts": 4, "samples": 4, "tokens": 64, "rounds": 3, "threads": 1, "turns": 1}
    o = read_options(__doc__, model=str, prompt_tokens=256, device=("cpu", "cuda"), **sizes)
    torch.set_num_threads(o.threads)
    if o.turns > 1:
        measure_turns(o)
    else:
        compare_with_transformers(o)


def compare_with_transformers(o: argparse.Namespace) -> None:
    """Print tokens per CPU second of both, and their ratio."""
    tokenizer = AutoTokenizer.from_pretrained(o.model)
    rows = [row["messages"] for row in arithmetic_rows(num_rows=o.prompts, max_operand=99, seed=3)]
    prompts = [
        tokenizer.apply_chat_template(row, add_generation_prompt=True, return_dict=False)
        for row in rows
        for _ in range(o.samples)
    ]
    device = torch.device(o.device)
    replica = Replica(o.model, torch.bfloat16, device)
    plain = AutoModelForCausalLM.from_pretrained(o.model, dtype=torch.bfloat16).eval().to(device)
    ids, mask = (tensor.to(device) for tensor in left_pad(prompts, tokenizer.eos_token_id))
    sampling = Sampling(max_new_tokens=o.tokens, min_new_tokens=o.tokens)

    def ours() -> None:
        generate(
            replica,
            prompts,
            [sampling] * len(prompts),
            [o.tokens] * len(prompts),
            list(range(len(prompts))),
            vocab_size=plain.config.vocab_size,
            end_token_ids=(tokenizer.eos_token_id,),
        )

    def theirs() -> None:
        options = {"do_sample": True, "top_k": 0, "max_new_tokens": o.tokens, "min_new_tokens": o.tokens}
        plain.generate(ids, attention_mask=mask, pad_token_id=tokenizer.eos_token_id, **options)

    ours(), theirs()
    seconds = cpu_seconds if o.device == "cpu" else wall_seconds
    taken = in_turn({"ours": ours, "transformers": theirs}, o.rounds, seconds)
    num_tokens = len(prompts) * o.tokens
    speeds = {f"{k}_tokens_per_s": round(num_tokens / statistics.median(s), 1) for k, s in taken.items()}
    ratio = statistics.median(b / a for a, b in zip(*taken.values(), strict=True))
    print(json.dumps(speeds | {"ratio": round(ratio, 2)}))


if __name__ == "__main__":
    main()
