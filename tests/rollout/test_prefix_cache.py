"""The embedded engine: what its prefix cache reads once, and the models that it samples from."""

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_core.embedded.cached_rows import PrefixCache
from areal_core.embedded.engine import EmbeddedEngine, ReplicaUpdate
from areal_core.embedded.generate import generate
from areal_core.embedded.replica import Replica
from areal_core.errors import ModelError
from areal_core.rollout.types import ModelRequest, Sampling
from benchmarks import model_families as families

PROMPTS = [list(range(5, 25)), [30, 31], [50] * 12, [60, 61, 62, 63]]
TOKEN_BYTES = 2 * 4  # keys and values of one token in the small cache below: one float each


@pytest.fixture
def replica(tiny_model) -> Replica:
    return Replica(str(tiny_model), torch.float32, torch.device("cpu"))


def sample(replica, prompts, count=6, seed=0):
    return generate(
        replica,
        prompts,
        [Sampling(max_new_tokens=count)] * len(prompts),
        [count] * len(prompts),
        [seed + row for row in range(len(prompts))],
        vocab_size=replica.model.config.vocab_size,
    )


def values_of(tokens):
    """One layer whose key of a token is the token itself, and whose value is its negative."""
    return lambda first, last: [
        tuple(sign * torch.tensor(tokens[first:last], dtype=torch.float32)[None, :, None] for sign in (1, -1))
    ]


def insert(cache, tokens):
    cache.insert(tokens, values_of(tokens), cache.epoch)


def found(cache, tokens):
    layers = cache.match(tokens)
    return layers[0][0][0, :, 0].tolist() if layers else []


def test_the_longest_beginning_is_found_and_a_row_replaces_the_one_that_it_continues():
    cache = PrefixCache(1 << 20)
    insert(cache, [1, 2, 3, 4])
    insert(cache, [1, 2, 8])
    assert found(cache, [1, 2, 3, 9]) == [1, 2, 3]
    assert found(cache, [5]) == []
    insert(cache, [1, 2, 3, 4, 5])
    assert found(cache, [1, 2, 3, 4, 5, 6]) == [1, 2, 3, 4, 5]
    assert cache.size_bytes == 8 * TOKEN_BYTES


def test_a_row_that_began_before_the_weights_changed_is_not_kept():
    cache = PrefixCache(1 << 20)
    before = cache.epoch
    cache.clear()
    cache.insert([1, 2], values_of([1, 2]), before)
    assert found(cache, [1, 2]) == []


def test_the_model_computes_each_token_of_a_group_of_four_turns_once(replica):
    computed = []
    replica.model.register_forward_pre_hook(
        lambda module, args, options: computed.append(options["input_ids"].numel()), with_kwargs=True
    )
    count, new, samples = 6, 3, 4
    prompt, engine = list(range(5, 25)), EmbeddedEngine(replica, replica.model.config.vocab_size)
    sampling = Sampling(max_new_tokens=count, ignore_eos=True)

    async def turn(contexts):
        requests = [
            ModelRequest(input_ids=context, sampling=sampling, metadata={"sample": row, "at": len(context)})
            for row, context in enumerate(contexts)
        ]
        return await asyncio.gather(*map(engine.agenerate, requests))

    def tokens_of_turn(contexts):
        before = sum(computed)
        answers = asyncio.run(turn(contexts))
        assert [len(answer.output_tokens) for answer in answers] == [count] * samples
        continued = [c + a.output_tokens + [7] * new for c, a in zip(contexts, answers, strict=True)]
        return sum(computed) - before, continued

    sampled = samples * (count - 1)  # the last token of an answer is read in the next turn
    found, contexts = tokens_of_turn([prompt] * samples)
    assert found == len(prompt) + sampled  # the prompt once for the group
    assert len({tuple(context) for context in contexts}) == samples
    for _ in range(3):
        found, contexts = tokens_of_turn(contexts)
        assert found == samples * (1 + new) + sampled
    ReplicaUpdate(replica, engine).send([], 1)  # with other weights everything is read again
    length = len(contexts[0])
    assert tokens_of_turn(contexts)[0] == samples * length + sampled


def test_a_weight_update_drops_what_was_read(replica):
    engine = EmbeddedEngine(replica, replica.model.config.vocab_size)
    sample(replica, PROMPTS)
    assert replica.prefixes.size_bytes > 0
    weights = {name: tensor + 0.01 for name, tensor in replica.model.named_parameters()}
    ReplicaUpdate(replica, engine).send(weights.items(), 1)
    assert replica.prefixes.size_bytes == 0
    updated = sample(replica, PROMPTS)
    assert [row.cached_tokens for row in updated] == [0] * 4
    replica.prefixes.clear()
    assert sample(replica, PROMPTS) == updated


@pytest.mark.parametrize(
    "name",
    [
        "gemma2",
        "gpt_oss",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("llama", "granite", "phi3, LongRoPE", "bloom")
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.long)])
def test_a_family_with_a_cache_of_keys_and_values_is_sampled_from(tmp_path, name, dtype):
    families.write_tiny(name, str(tmp_path))
    replica = Replica(str(tmp_path), dtype, torch.device("cpu"))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, attn_implementation="eager")
    ids = torch.arange(3, 12)[None]
    found, expected = (
        model(input_ids=ids).logits.float().log_softmax(-1) for model in (replica.model, plain)
    )
    assert (found - expected).abs().max() < {torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]


@pytest.mark.parametrize("name", ["mamba", "lfm2", "qwen3_next"])
def test_a_family_with_another_state_is_refused_with_a_sentence(tmp_path, name):
    families.write_tiny(name, str(tmp_path))
    with pytest.raises(
        ModelError, match=f"cannot sample from '{name}' models, use sglang in allocation_mode"
    ):
        Replica(str(tmp_path), torch.float32, torch.device("cpu"))
