"""Collections of several hosts merged into one."""

import io
import json
import tarfile

import pytest

from hangdoctor.collect.write import (
    HostEntry,
    Manifest,
    ProcessEntry,
    merge,
    read_manifest,
    unpack,
    write_manifest,
    write_text,
)


def entry(name, rank=None, role="trainer", status="dumped", host="a", parent=None, detail=""):
    pid = None if status == "gone" else 1
    return ProcessEntry(name, rank, role, host, pid, parent, status, detail, "python train.py")


def collection(folder, host, *processes, job_size=4, elsewhere=()):
    for process in processes:
        if process.pid:
            write_text(folder / f"samples/0/{process.name}.json", f"{host} {process.name}")
    write_manifest(folder, Manifest(7.0, job_size, elsewhere, (HostEntry(host),), (8.0, 9.0), processes, 1))
    return folder


def test_every_host_keeps_its_files_under_names_of_its_own(tmp_path):
    a = collection(
        tmp_path / "a",
        "a",
        entry("rank_0", 0),
        entry("engine_rank_0", 0, "engine"),
        entry("engine_rank_0_child_0", None, "child", parent="engine_rank_0"),
        entry("launcher", role="launcher"),
        elsewhere=(1,),
        job_size=2,
    )
    b = collection(
        tmp_path / "b",
        "b",
        entry("rank_1", 1, host="b"),
        entry("engine_rank_0", 0, "engine", host="b"),
        entry("engine_rank_0_child_0", None, "child", host="b", parent="engine_rank_0"),
        entry("launcher", role="launcher", host="b"),
        elsewhere=(0,),
        job_size=2,
    )
    merged = merge([a, b], [], tmp_path / "all", all_queried=True)
    assert merged == read_manifest(tmp_path / "all")
    assert [(process.name, process.rank, process.parent, process.host) for process in merged.processes] == [
        ("rank_0", 0, None, "a"),
        ("engine_rank_0", 0, None, "a"),
        ("engine_rank_0_child_0", None, "engine_rank_0", "a"),
        ("launcher", None, None, "a"),
        ("rank_1", 1, None, "b"),
        ("engine_rank_1", 1, None, "b"),
        ("engine_rank_1_child_0", None, "engine_rank_1", "b"),
        ("launcher_1", None, None, "b"),
    ]
    samples = {path.name: path.read_text() for path in (tmp_path / "all/samples/0").iterdir()}
    assert samples["engine_rank_1_child_0.json"] == "b engine_rank_0_child_0"
    assert samples["engine_rank_0.json"] == "a engine_rank_0"
    assert len(samples) == 8


def ends_of(merged):
    return [p.name for p in merged.processes if p.status == "gone"], merged.elsewhere


def test_rank_that_no_host_has_is_gone_when_all_hosts_of_the_job_answered(tmp_path):
    a = collection(
        tmp_path / "a", "a", entry("rank_0", 0), entry("rank_1", 1, status="gone"), elsewhere=(2, 3)
    )
    assert ends_of(merge([a], [], tmp_path / "all", all_queried=True)) == (["rank_1", "rank_2", "rank_3"], ())


def test_rank_of_a_host_that_was_not_queried_or_did_not_respond_is_not_gone(tmp_path):
    down = HostEntry("b", "unreachable", "no route")
    for failed, all_queried in (([], False), ([down], True)):
        a = collection(
            tmp_path / "a", "a", entry("rank_0", 0), entry("rank_1", 1, status="gone"), elsewhere=(2, 3)
        )
        merged = merge([a], failed, tmp_path / "all", all_queried)
        assert ends_of(merged) == (["rank_1"], (2, 3))
        written = json.loads((tmp_path / "all/collection.json").read_text())
        assert (written["world_size"], written["job_size"]) == (None, 4)
        assert written["hosts"][-1] == {
            "host": "other hosts",
            "status": "unreachable",
            "detail": "2 ranks from 2 to 3 were not collected",
        }
        assert read_manifest(tmp_path / "all") == merged


@pytest.mark.parametrize("name", ["../escaped", "/tmp/escaped", "a/../../escaped"])
def test_answer_cannot_write_outside_its_folder(tmp_path, name):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    with pytest.raises(ValueError, match="the response has the file name"):
        unpack(packed.getvalue(), tmp_path / "in")
