"""Which tensors a delta leaves out, without a server: each reason to send all of them alone."""

from types import SimpleNamespace

import pytest
import torch

from areal_core.servers.delta import Delta

WEIGHTS = {"a": torch.zeros(2), "b": torch.ones(3), "c": torch.full((2,), 2.0)}


def sent(delta, versions, is_proved=lambda name: True):
    pool = SimpleNamespace(servers=list(versions), versions=versions)
    return [name for name, _ in delta.changed(WEIGHTS.items(), pool, is_proved)]


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
