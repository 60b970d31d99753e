"""The name service: entries appear at once or not at all."""

import getpass
from concurrent.futures import ThreadPoolExecutor

import pytest

from areal_core.rollout.errors import BadName, NoSuchName
from areal_core.servers.discovery import FolderNames, discovered_servers, register_server
from areal_core.servers.server import Server


@pytest.fixture
def names(tmp_path):
    return FolderNames(tmp_path / "names")


def test_an_entry_is_read_replaced_and_deleted(names):
    names.add("u/e/t/a", "1")
    assert names.get("u/e/t/a") == "1"
    names.add("u/e/t/a", "2")
    assert names.get("u/e/t/a") == "2"
    names.delete("u/e/t/a")
    for gone in (names.get, names.delete):
        with pytest.raises(NoSuchName, match="there is no u/e/t/a"):
            gone("u/e/t/a")


@pytest.mark.parametrize("name", ["", "/etc/passwd", "a/../b", "a//b", "a/ENTRY"])
def test_a_name_that_leaves_the_tree_is_refused(names, name):
    with pytest.raises(BadName):
        names.add(name, "x")


def test_writers_at_once_leave_no_torn_text(tmp_path):
    names = FolderNames(tmp_path)
    texts = [str(i) * 5000 for i in range(8)]

    def add_then_read(text: str) -> bool:
        names.add("a/b", text)
        return names.get("a/b") in texts

    def come_and_go(i: int) -> None:
        for _ in range(20):
            names.add(f"c/{i}", "x")
            names.delete(f"c/{i}")

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(add_then_read, texts))
        list(threads.map(come_and_go, range(8)))  # the folder c comes and goes below them
    assert names.below("c") == {}


def test_registered_servers_are_discovered_by_their_run_only(names):
    entry = register_server(names, "exp", "try", "h:1")
    assert entry.startswith(f"{getpass.getuser()}/exp/try/gen_servers/")
    register_server(names, "exp", "other", "h:2")
    assert discovered_servers(names, "exp", "try") == {entry: Server("h:1")}
