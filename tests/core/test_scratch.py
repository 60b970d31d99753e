"""Replacing a file or a folder: a failure, or a kill, leaves the one that was there."""

import os
from pathlib import Path

import pytest

from areal_core.safety.scratch import unfinished_folder


def make(path, is_folder, text):
    if is_folder:
        path.mkdir()
        path = path / "inside"
    path.write_text(text)


def content_of(path):
    return (path / "inside" if path.is_dir() else path).read_text()


@pytest.mark.parametrize("was_folder", [False, True])
@pytest.mark.parametrize("is_folder", [False, True])
@pytest.mark.parametrize("fails_until", [0, 1, 99])
def test_a_rename_that_fails_leaves_what_was_there(tmp_path, monkeypatch, was_folder, is_folder, fails_until):
    """The rename of the content fails; of those after it, which put back the old one, too."""
    destination = tmp_path / "there"
    make(destination, was_folder, "old")
    rename, number = Path.rename, 0

    def failing(self, target):
        nonlocal number
        if self.name == "content" or number:
            number += 1
            if number <= fails_until:
                raise OSError(28, os.strerror(28))
        return rename(self, target)

    def replace():
        with unfinished_folder(destination) as content:
            make(content, is_folder, "new")

    # as on a file system that cannot exchange
    monkeypatch.setattr("areal_core.safety.scratch.exchanged", lambda one, other: False)
    monkeypatch.setattr(Path, "rename", failing)
    if fails_until:
        with pytest.raises(OSError, match="No space"):
            replace()
    else:
        replace()
    monkeypatch.undo()
    if fails_until <= 1:
        assert content_of(destination) == ("old" if fails_until else "new")
        assert os.listdir(tmp_path) == ["there"]
    with unfinished_folder(destination):  # the next process finds it
        assert content_of(destination) == ("old" if fails_until else "new")
    assert content_of(destination) == ("old" if fails_until else "new")


@pytest.mark.parametrize("was_folder", [False, True])
def test_what_is_there_is_never_away(tmp_path, monkeypatch, was_folder):
    """A folder is exchanged: nothing is renamed to make room for it."""
    destination = tmp_path / "there"
    make(destination, was_folder, "old")
    monkeypatch.setattr(Path, "rename", None)
    with unfinished_folder(destination) as content:
        make(content, True, "new")
    assert content_of(destination) == "new"
    assert os.listdir(tmp_path) == ["there"]
