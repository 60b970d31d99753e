"""Files and folders that are complete, absent or as before, logs of complete lines, disk errors."""

import errno
import logging
import os
import re
import stat
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from areal_core.errors import RewardFailed
from areal_core.launch.torchrun import copy_output
from areal_core.safety import durable
from areal_core.safety.durable import (
    append_lines,
    commit_file,
    commit_folder,
    os_error_of,
    remove_partial_line,
    replacing,
    sentence_of,
)
from areal_core.safety.scratch import unfinished_folder
from areal_core.telemetry.loggers import JsonlLogger, read_stats
from areal_debug.streams import guarded
from areal_debug.train.script import mistakes_as_sentences

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def write_half(file, error):
    with replacing(file) as out:
        out.write(b"half")
        raise error


def test_a_file_that_cannot_be_completed_keeps_its_old_content_and_leaves_nothing(tmp_path):
    file = tmp_path / "page.html"
    commit_file(file, "old ä")
    with pytest.raises(OSError, match="No space left") as caught:
        write_half(file, FULL)
    assert (file.read_text("utf-8"), os.listdir(tmp_path)) == ("old ä", ["page.html"])
    assert sentence_of(caught.value) == (
        f"{file}: No space left on device; free space on that disk, or choose another place"
    )
    with pytest.raises(KeyboardInterrupt):
        write_half(tmp_path / "export", KeyboardInterrupt())
    assert os.listdir(tmp_path) == ["page.html"]


def test_no_link_that_somebody_left_is_written_through(tmp_path):
    (victim := tmp_path / "victim").write_text("mine")
    for name in ("config.json.tmp", "stats.jsonl"):
        (tmp_path / name).symlink_to(victim)
    os.link(victim, tmp_path / "other.json.tmp")
    commit_file(tmp_path / "config.json", "new")
    commit_file(tmp_path / "other.json", "new")
    with pytest.raises(OSError, match="symbolic links") as caught:
        append_lines(tmp_path / "stats.jsonl", "line\n")
    assert "a link is not followed here" in sentence_of(caught.value)
    assert (victim.read_text(), (tmp_path / "config.json").read_text()) == ("mine", "new")


def test_a_device_is_written_and_not_replaced(tmp_path):
    commit_file(tmp_path / "link", b"")
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("/dev/null")
    commit_file(tmp_path / "link", b"content")
    assert (tmp_path / "link").is_symlink()
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


# Folders


def commit_folder_with(folder, content):
    partial = folder.with_name(folder.name + ".partial")
    partial.mkdir()
    (partial / "file").write_text(content)
    commit_folder(partial, folder)


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_folder_replaces_the_one_before(tmp_path, monkeypatch, can_exchange):
    if not can_exchange:
        monkeypatch.setattr(durable, "exchanged", lambda one, other: False)
    for content in ("first", "second"):
        commit_folder_with(tmp_path / "model", content)
        assert os.listdir(tmp_path) == ["model"]
        assert (tmp_path / "model/file").read_text() == content


def test_a_folder_comes_back_where_names_cannot_be_exchanged_and_the_new_one_gets_none(tmp_path, monkeypatch):
    commit_folder_with(tmp_path / "model", "first")
    monkeypatch.setattr(durable, "exchanged", lambda one, other: False)
    (tmp_path / "model.partial").mkdir()
    rename = durable.Path.rename

    def fails(path, target):
        if path.name == "model.partial":
            raise FULL
        return rename(path, target)

    monkeypatch.setattr(durable.Path, "rename", fails)
    with pytest.raises(OSError, match="No space left"):
        commit_folder(tmp_path / "model.partial", tmp_path / "model")
    assert (tmp_path / "model/file").read_text() == "first"


# Logs


@pytest.mark.parametrize("num_lines", [0, 1, 5000])
def test_an_incomplete_last_line_is_replaced_by_the_next_lines(tmp_path, num_lines):
    log = tmp_path / "log"
    lines = "".join(f"line {number:060d}\n" for number in range(num_lines))
    log.write_text(lines + "{half of a li")
    append_lines(log, "next\n")
    assert log.read_text() == lines + "next\n"
    log.write_text(lines + "{half")
    remove_partial_line(log)
    assert log.read_text() == lines


def test_a_full_disk_leaves_no_half_line(tmp_path, monkeypatch):
    log = tmp_path / "log"
    append_lines(log, "first\n")

    def half(file, data):
        file.write(data[: len(data) // 2])
        raise FULL

    monkeypatch.setattr(durable, "write_all", half)
    with pytest.raises(OSError, match=f"No space left on device: '{log}'"):
        append_lines(log, "second\n")
    assert log.read_text() == "first\n"


def test_statistics_continue_after_a_line_that_a_killed_run_did_not_complete(tmp_path):
    file = tmp_path / "stats.jsonl"
    JsonlLogger(file)(0, {"loss": 1.5})
    with file.open("a") as lines:
        lines.write('{"step": 1, "lo')
    assert read_stats(file) == [{"step": 0, "loss": 1.5}]
    JsonlLogger(file)(1, {"loss": 0.5})
    assert read_stats(file) == [{"step": 0, "loss": 1.5}, {"step": 1, "loss": 0.5}]


# Runs


def test_ranks_go_on_when_their_log_cannot_be_written(caplog):
    reader, writer = os.pipe()
    os.write(writer, b"output of a rank")
    os.close(writer)
    with (
        caplog.at_level(logging.WARNING),
        open("/dev/full", "wb", buffering=0) as log,
        os.fdopen(reader, "rb") as source,
    ):
        copy_output(source, log, False)
        assert source.read() == b""
    assert "the log of the ranks ends here: No space left on device" in caplog.text


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (MemoryError(), "Cannot allocate memory; raise `ulimit -v`"),
        (
            ImportError("libtorch.so: failed to map segment from shared object"),
            r"memory \(libtorch.so: .* `ulimit -v`",
        ),
        (RuntimeError("can't start new thread"), "raise `ulimit -u`"),
        (RuntimeError("Symlink loop from 'a'"), "a link is not followed here"),
    ],
)
def test_what_libraries_say_in_place_of_an_errno_is_one_sentence(error, sentence, capsys):
    def fails():
        raise error

    with pytest.raises(SystemExit) as end:
        guarded(fails)
    assert end.value.code == 2
    assert re.search(f"^Error: .*{sentence}.*$", capsys.readouterr().err)
    assert os_error_of(ValueError(str(error))) is None


def test_a_full_disk_ends_a_rank_with_one_sentence_and_code_1(monkeypatch, capsys):
    def exit_now(code):
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", exit_now)
    with pytest.raises(SystemExit) as end, mistakes_as_sentences():
        raise RewardFailed("score returned None; expected a finite number")
    assert end.value.code == 1
    assert "returned None" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end, mistakes_as_sentences():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/stats.jsonl")
    assert end.value.code == 1
    assert capsys.readouterr().err == (
        "Error: runs/stats.jsonl: No space left on device; free space on that disk, or choose another place\n"
    )
    with pytest.raises(ConnectionRefusedError), mistakes_as_sentences():
        raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")
    with pytest.raises(SystemExit) as end, mistakes_as_sentences():
        AutoTokenizer.from_pretrained("no-folder/of-a-model", local_files_only=True)
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith(
        "Error: a model or tokenizer is neither a folder here nor on the hub: We couldn't connect to"
    )


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
