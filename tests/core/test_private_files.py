"""Users of one machine: each has folders of their own and uses nothing that another one planted."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_core.config import GRPOConfig
from areal_core.paths import make_run_folders, run_folder
from areal_core.safety.private import ForeignOwner, check_owner, make_private, make_shared, read_owned
from areal_core.servers.discovery import FolderNames, discovered_servers, register_server

ALICE, BOB = 12001, 12002
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="becomes other users")


def as_user(uid: int, call: Callable[[], object]) -> str:
    """Run `call` in a child process of a user; return its result, or its error, as text."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgid(uid)
            os.setuid(uid)
            os.environ["USER"] = os.environ["LOGNAME"] = f"u{uid}"
            result = str(call())
        except BaseException as error:
            result = f"{type(error).__name__}: {error}"
        os.write(writer, result.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as text:
        result = text.read()
    os.waitpid(child, 0)
    return result


@pytest.fixture
def shared(tmp_path_factory) -> Path:
    """A folder like /tmp, that other users reach."""
    folder = tmp_path_factory.mktemp("shared")
    for parent in (folder, *folder.parents[:3]):
        parent.chmod(stat.S_IMODE(parent.stat().st_mode) | 0o011)
    folder.chmod(0o1777)
    return folder


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_shared_folders_have_the_access_of_the_folder_that_they_are_in(shared):
    make_shared(shared / "a/b")
    assert (mode(shared / "a"), mode(shared / "a/b")) == (0o1777, 0o1777)
    (shared / "mine").mkdir(mode=0o700)
    make_shared(shared / "mine/a")
    assert mode(shared / "mine/a") == 0o700


def test_an_own_folder_that_others_may_write_is_closed(tmp_path):
    make_private(tmp_path / "new")
    make_private(tmp_path / "group", group_readable=True)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    make_private(tmp_path / "open")
    assert [mode(tmp_path / name) for name in ("new", "group", "open")] == [0o700, 0o750, 0o755]


def test_links_are_not_used(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "text").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").symlink_to(tmp_path / "text")
    with pytest.raises(ForeignOwner, match="is a link, which is not followed"):
        make_private(tmp_path / "link")
    with pytest.raises(ValueError, match="is a link: it is not followed"):
        read_owned(tmp_path / "file")
    assert read_owned(tmp_path / "text") == "x"


@needs_root
def test_two_users_share_one_folder_of_runs_and_of_names(shared):
    config = GRPOConfig(experiment_name="e", trial_name="t")
    config.cluster.fileroot = str(shared / "areal")
    names = FolderNames(shared / "areal/name_resolve")

    def run() -> list[str]:
        make_run_folders(config)
        folder = run_folder(config, "logs")
        folder.mkdir(parents=True)
        (folder / "stats.jsonl").write_text("{}")
        register_server(names, "e", "t", f"host-{os.getuid()}:1")
        return [server.address for server in discovered_servers(names, "e", "t").values()]

    assert as_user(ALICE, run) == f"['host-{ALICE}:1']"
    assert as_user(BOB, run) == f"['host-{BOB}:1']"
    for user in (ALICE, BOB):
        assert mode(shared / f"areal/logs/u{user}") == 0o700
        assert mode(shared / f"areal/name_resolve/u{user}") == 0o700
        assert mode(shared / f"areal/logs/u{user}/e/t/stats.jsonl") == 0o600
    assert "PermissionError" in as_user(BOB, (shared / f"areal/logs/u{ALICE}/e/t/stats.jsonl").read_text)


@needs_root
def test_a_planted_name_service_does_not_lead_to_another_users_server(shared):
    names = FolderNames(shared / "areal/name_resolve")

    def plant() -> None:
        folder = shared / f"areal/name_resolve/u{BOB}/e/t/gen_servers/x"
        folder.mkdir(parents=True)
        (folder / "ENTRY").write_text("127.0.0.1:6666")
        (shared / "areal").chmod(0o777)
        (shared / "areal/name_resolve").chmod(0o777)

    assert as_user(ALICE, plant) == "None"
    refused = f"belongs to uid {ALICE} and not to uid {BOB}: it is not used"
    assert refused in as_user(BOB, lambda: discovered_servers(names, "e", "t"))
    assert refused in as_user(BOB, lambda: register_server(names, "e", "t", "h:1"))


@needs_root
def test_an_entry_of_another_user_in_an_own_folder_is_refused(shared):
    names = FolderNames(shared / "names")
    name = as_user(BOB, lambda: register_server(names, "e", "t", "h:1"))
    os.chown(shared / "names" / name / "ENTRY", ALICE, ALICE)
    assert f"belongs to uid {ALICE}" in as_user(BOB, lambda: discovered_servers(names, "e", "t"))


@needs_root
def test_a_planted_folder_of_runs_is_refused(shared):
    config = GRPOConfig(experiment_name="e", trial_name="t")
    config.cluster.fileroot = str(shared)

    def plant() -> None:
        (shared / f"logs/u{BOB}").mkdir(parents=True)
        (shared / "logs").chmod(0o777)
        (shared / f"logs/u{BOB}").chmod(0o777)

    as_user(ALICE, plant)
    assert as_user(BOB, lambda: make_run_folders(config)).startswith(
        f"ForeignOwner: {shared}/logs/u{BOB} belongs to"
    )


@needs_root
def test_root_does_not_use_what_a_user_planted(shared):
    as_user(ALICE, lambda: (shared / "root").mkdir(mode=0o777))
    with pytest.raises(ForeignOwner, match=f"belongs to uid {ALICE} and not to root"):
        check_owner(shared / "root")
