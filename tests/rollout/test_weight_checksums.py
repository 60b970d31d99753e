"""Checksums of sent weights, a difference is named, and tensors that a delta leaves out."""

import hashlib
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from areal_core.rollout.errors import WeightUpdateFailed
from areal_core.servers.delta import Delta
from areal_core.servers.verification import ExpectedWeights, WeightCheck, sha256_of, words_hash
from areal_core.servers.wire import HeldWeights

QKV = "model.layers.0.self_attn.qkv_proj.weight"
Q, K, V = (QKV.replace("qkv", part) for part in "qkv")


def random_tensor(*shape: int, seed: int = 0, dtype=torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_a_cpu_server_hashes_the_bytes_with_sha256():
    assert sha256_of(torch.tensor([1.0, -2.0])) == hashlib.sha256(b"\0\0\x80\x3f\0\0\0\xc0").hexdigest()[:16]


@pytest.mark.parametrize(
    ("size", "dtype", "expected"),
    [
        (1, torch.float32, "1f2f5250e8187466"),
        (5, torch.bfloat16, "b7957d09e9c9e6a0"),  # half a word is padded
        (8192, torch.float32, "d1d0d9059c7936ef"),  # a complete tile
        (20001, torch.bfloat16, "885cdd61430b9928"),
        (50000, torch.float32, "858a7df008b424e0"),
    ],
)
def test_a_gpu_servers_hash_is_that_of_sglangs_kernel(size, dtype, expected):
    """The values are those of SGLang 0.5.23's kernel, run by Triton's interpreter."""
    assert words_hash(random_tensor(size, seed=size, dtype=dtype)) == expected


def expectation(names, weights, dtype=torch.float32) -> ExpectedWeights:
    expected = ExpectedWeights(names, sha256_of, dtype)
    assert [name for name, _ in expected.watch(weights.items())] == list(weights)
    return expected


def test_parts_are_joined_in_the_servers_order_whatever_order_they_come_in():
    weights = {V: random_tensor(2, 4, seed=1), Q: random_tensor(4, 4, seed=2), K: random_tensor(2, 4, seed=3)}
    server_weights = HeldWeights(
        {QKV: [sha256_of(torch.cat([weights[Q], weights[K], weights[V]]))]}, is_sharded=False
    )
    assert expectation([QKV], weights).compare(server_weights).differ == []
    short = {**weights, K: weights[K][:-1]}
    assert expectation([QKV], short).compare(server_weights).differ == [QKV]


def test_the_vocabulary_may_be_padded_with_rows_of_zeros_but_with_nothing_else():
    name = "model.embed_tokens.weight"
    embedding = random_tensor(105, 4)
    expected = expectation([name], {name: embedding})
    for rows, differs in ((torch.zeros(23, 4), False), (torch.ones(23, 4), True), (torch.zeros(0, 4), False)):
        server_weights = HeldWeights({name: [sha256_of(torch.cat([embedding, rows]))]}, is_sharded=False)
        assert bool(expected.compare(server_weights).differ) == differs


def test_what_cannot_be_compared_is_named_and_is_no_difference():
    expected = expectation(["norm", "experts.w13_weight"], {"norm": torch.ones(2), "extra": torch.ones(2)})
    checksums = {
        "norm": [sha256_of(torch.ones(2))],
        "experts.w13_weight": ["0"],
        "rotary_emb.cos_sin_cache": ["1"],
    }
    found = expected.compare(HeldWeights(checksums, is_sharded=False))
    assert (found.differ, found.not_compared) == ([], ["extra", "experts.w13_weight"])
    found = expected.compare(HeldWeights(checksums, is_sharded=True))
    assert (found.differ, found.not_compared) == ([], ["norm", "experts.w13_weight"])


def checker_reply(checksums: dict[str, str], tp_size: int = 1) -> dict:
    return {"success": True, "ranks": [{"checksums": checksums, "parallelism_info": [{"tp_size": tp_size}]}]}


# ---- the check around a weight update


@pytest.fixture
def update_of(start_fake, update_by_disk):
    def make(checksums: dict[str, str], every: int = 1):
        fake = start_fake()
        fake.refuse["/weights_checker"] = 200, checker_reply(checksums)
        return fake, update_by_disk(fake, check=WeightCheck(every))

    return make


WEIGHTS = {Q: torch.ones(2, 2), K: torch.ones(2, 2), V: torch.ones(2, 2), "norm": torch.ones(2)}
SERVER_WEIGHTS = {QKV: sha256_of(torch.ones(6, 2)), "norm": sha256_of(torch.ones(2))}


def test_a_difference_fails_the_update_names_the_tensor_and_generation_continues(update_of):
    fake, update = update_of({**SERVER_WEIGHTS, QKV: "0123456789abcdef"})
    with pytest.raises(WeightUpdateFailed) as failed:
        update.send(WEIGHTS.items(), 3)
    assert (
        f"WeightsDiffer: after the weight update to version 3 the server at {fake.server.address} holds other weights than the trainer: "
        f"1 tensor, {QKV} (sent as q_proj, k_proj, v_proj)"
    ) in str(failed.value)
    assert fake.routes()[-1] == "/continue_generation"


def test_the_first_update_and_every_kth_after_it_is_checked_while_generation_is_paused(update_of):
    fake, update = update_of(SERVER_WEIGHTS, every=3)
    for version in range(1, 6):
        update.send(WEIGHTS.items(), version)
    checks = [i for i, route in enumerate(fake.routes()) if route == "/weights_checker"]
    plain = ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
    checked = ["/weights_checker", *plain[:2], "/weights_checker", plain[2]]
    assert fake.routes() == checked + 2 * plain + checked + plain
    assert len(checks) == 4


SENT = {"a": torch.zeros(2), "b": torch.ones(3), "c": torch.full((2,), 2.0)}


def sent(delta, versions, is_proved=lambda name: True):
    pool = SimpleNamespace(servers=list(versions), versions=versions)
    return [name for name, _ in delta.changed(SENT.items(), pool, is_proved)]


@pytest.fixture
def delta():
    """After an update to version 4 of the server A."""
    delta = Delta(anchor_interval=2)
    assert sent(delta, {"A": "3"}) == ["a", "b", "c"]
    delta.commit(4, SimpleNamespace(servers=["A"]))
    return delta


@pytest.mark.parametrize("versions", [{"A": "default"}, {"A": None}, {"A": "4", "B": "4"}])
def test_a_server_that_was_restarted_or_joined_gets_all(delta, versions):
    assert sent(delta, versions) == ["a", "b", "c"]


def test_after_an_update_that_failed_all_are_sent_to_a_server_with_the_same_version(delta):
    assert sent(delta, {"A": "4"}) == ["c"]  # the last one, which brings the version; it is not committed
    assert sent(delta, {"A": "4"}) == ["a", "b", "c"]


def test_a_tensor_that_no_checksum_shows_is_always_sent(delta):
    assert sent(delta, {"A": "4"}, lambda name: name != "b") == ["b"]
