"""Folders, tars and posts: the process of each file, and what happens to unusable files."""

import io
import tarfile

import pytest

from hangdoctor.errors import HangInputError
from hangdoctor.parse.location import ProcessName, parse_name
from hangdoctor.parse.members import tar_members
from hangdoctor.parse.read import read_snapshot

STACK = 'Thread 1 (idle): "MainThread"\n    f (a.py:1)\n'


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("rank_3.txt", ProcessName("rank_3", 3)),
        ("stack_rank12.native.txt", ProcessName("rank_12", 12)),
        ("host-2_rank_17.json", ProcessName("rank_17", 17, host="host-2")),
        ("engine_rank_1.txt", ProcessName("engine_rank_1", 1, "engine")),
        ("node1_sglang_rank-0.txt", ProcessName("engine_rank_0", 0, "engine")),
        ("rank_0_child_2.json", ProcessName("rank_0_child_2", None, "child", parent="rank_0")),
        ("nccl_trace_rank_5", ProcessName("rank_5", 5)),
        ("7.txt", ProcessName("rank_7", 7)),
        ("launcher.txt", ProcessName("launcher", None)),
    ],
)
def test_file_names_say_whose_dump_it_is(file, name):
    assert parse_name(file) == name


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "No stacks of any rank"),
        ({"notes.md": "nothing here"}, "Looked for py-spy text"),
        (
            {"collection.json": '{"format": "hangdoctor-collection", "version": 9}'},
            "version 9 and this program reads 1",
        ),
        ({"collection.json": '{"format": "zip"}'}, "is not hangdoctor's"),
    ],
)
def test_unusable_input_reports_what_is_wrong(tmp_path, files, says):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(HangInputError, match=says):
        read_snapshot([tmp_path])


def test_a_member_that_points_out_of_the_tar_is_read_in_memory_and_written_nowhere(tmp_path):
    path = tmp_path / "evil.tar.gz"
    data = b"Thread 1 (idle)\n    f (a.py:1)\n"
    with tarfile.open(path, "w:gz") as tar:
        for name, kind in (("../../rank_0.txt", tarfile.REGTYPE), ("/etc/rank_1.txt", tarfile.SYMTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.size, info.linkname = (
                kind,
                len(data) if kind == tarfile.REGTYPE else 0,
                "/etc/passwd",
            )
            tar.addfile(info, io.BytesIO(data) if kind == tarfile.REGTYPE else None)
    before = sorted(tmp_path.rglob("*"))
    assert [d.rank for d in read_snapshot([path]).dumps] == [0]
    assert sorted(tmp_path.rglob("*")) == before


def some_tar(path):
    """Write a tar with headers of every kind; return its regular files as tarfile reads them."""
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        folder = tarfile.TarInfo("./c")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name in (
            "./c/rank_0.txt",
            "c/rank_1.txt",
            "c/räng_2.txt",
            f"c/{'d' * 120}/rank_3.txt",
            "c/rank_4.txt",
        ):
            data = name.encode() * 50
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), 1.5 if name == "c/rank_4.txt" else 1
            tar.addfile(info, io.BytesIO(data))
        link = tarfile.TarInfo("c/rank_5.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    with tarfile.open(path) as tar:
        return [
            (member.name.removeprefix("./"), tar.extractfile(member).read())
            for member in tar
            if member.isreg()
        ]


@pytest.mark.parametrize("at", [0, 140, 156, 2048 + 124])
def test_a_tar_is_read_up_to_a_header_with_a_changed_byte(tmp_path, at):
    path = tmp_path / "c.tar"
    expected = some_tar(path)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    notes = []
    assert list(tar_members(path, notes)) == (expected[:1] if at > 512 else [])
    assert "the tar is damaged after this point" in notes[0]


def test_stacks_in_a_folder_called_logs_are_stacks(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rank_3.log").write_text(f"step 4\n{STACK}")
    snapshot = read_snapshot([tmp_path])
    assert [(d.rank, d.threads[0].frames[0].function) for d in snapshot.dumps] == [(3, "f")]
    assert snapshot.logs[0].rank == 3


def test_a_log_that_starts_with_a_bracket_is_no_json(tmp_path):
    (tmp_path / "all.log").write_text('[rank0]: Thread 1 (idle): "MainThread"\n[rank0]:     f (a.py:1)\n')
    assert [d.rank for d in read_snapshot([tmp_path]).dumps] == [0]
