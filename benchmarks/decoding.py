"""Sampling in the trainer's process: our decode loop compared with Transformers' `generate`.

    python benchmarks/decoding.py --model FOLDER [--prompts 4] [--samples 4] [--tokens 64]
                                  [--rounds 3] [--threads 1]

The same bfloat16 weights, prompts and number of tokens, at temperature 1, in turn in one process.
Ours also returns each token's logprob. `python examples/smollm2.py FOLDER` writes such a model.
Prints medians of tokens per CPU second and their ratio as one JSON line.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_core.dataset import arithmetic_rows
from areal_core.embedded.generate import generate, left_pad
from areal_core.embedded.replica import Replica
from areal_core.rollout.types import Sampling


def cpu_s(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="checkpoint folder")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4, help="completions per prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per completion, exactly")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    o = parser.parse_args()
    torch.set_num_threads(o.threads)
    tokenizer = AutoTokenizer.from_pretrained(o.model)
    rows = [row["messages"] for row in arithmetic_rows(num_rows=o.prompts, max_operand=99, seed=3)]
    prompts = [
        tokenizer.apply_chat_template(row, add_generation_prompt=True, return_dict=False)
        for row in rows
        for _ in range(o.samples)
    ]
    replica = Replica(o.model, torch.bfloat16, torch.device("cpu"))
    plain = AutoModelForCausalLM.from_pretrained(o.model, dtype=torch.bfloat16).eval()
    ids, mask = left_pad(prompts, tokenizer.eos_token_id)
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
    pairs = [(cpu_s(ours), cpu_s(theirs)) for _ in range(o.rounds)]
    num_tokens = len(prompts) * o.tokens
    print(
        json.dumps(
            {
                "ours_tokens_per_s": round(num_tokens / statistics.median(ours_s for ours_s, _ in pairs), 1),
                "transformers_tokens_per_s": round(num_tokens / statistics.median(s for _, s in pairs), 1),
                "ratio": round(statistics.median(theirs_s / ours_s for ours_s, theirs_s in pairs), 2),
            }
        )
    )


if __name__ == "__main__":
    main()
