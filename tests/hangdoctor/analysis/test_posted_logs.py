"""Logs and stacks as people post them: other prefixes, broken lines, several groups, weight updates."""

import tomllib
from pathlib import Path

import pytest

from hangdoctor.diagnose import diagnose
from hangdoctor.parse.read import read_snapshot

POSTS = tomllib.loads(Path(__file__).with_name("posts.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", POSTS)
def test_post_is_read(tmp_path, name):
    post = POSTS[name]
    (tmp_path / "post.txt").write_text(post["text"])
    found = diagnose(read_snapshot([tmp_path / "post.txt"]))
    said = f"{found.summary} ({found.confidence})".lower()
    parts = [post["says"]] if isinstance(post["says"], str) else post["says"]
    assert (found.label, [part for part in parts if part not in said]) == (post["label"], []), said
    assert "watchdog_timeout" not in said
    assert "culprits" not in post or list(found.culprit_ranks) == post["culprits"]
