"""Garbage collections stay short in a block, and what was left out before stays left out."""

import gc

from areal_core.rollout.loop_thread import SHORT_COLLECTIONS, short_collections


def test_a_block_in_another_does_not_end_what_that_has_left_out(monkeypatch):
    frozen, before = [], gc.get_threshold()
    monkeypatch.setattr(gc, "collect", lambda: 0)
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append("all"))
    monkeypatch.setattr(gc, "unfreeze", frozen.clear)
    monkeypatch.setattr(gc, "get_freeze_count", lambda: len(frozen))
    with short_collections():
        assert (frozen, gc.get_threshold()) == (["all"], SHORT_COLLECTIONS)
        with short_collections():
            assert frozen == ["all"]
        assert (frozen, gc.get_threshold()) == (["all"], SHORT_COLLECTIONS)
    assert (frozen, gc.get_threshold()) == ([], before)
