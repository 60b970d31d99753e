"""Names from outside are refused unless they can only mean a file below their folder."""

import os

import pytest

from areal_core.safety.file_names import UnsafeName, checked_name, one_part, open_below

UNSAFE = {
    "": "has an empty or dot part",
    "/etc/passwd": "is not relative",
    "a//b": "has an empty or dot part",
    "../a": "has an empty or dot part",
    "a/../../b": "has an empty or dot part",
    "./a": "has an empty or dot part",
    "a/": "has an empty or dot part",
    "a\\b": "is not relative",
    "a\0b": "has a control character",
    "a\nb": "has a control character",
    "\x1b[2Ja": "has a control character",
    "a\u202eb": "has a control character",
    "a\udcffb": "has a control character",
    "a" * 256: "is longer than",
    "/".join(["a" * 200] * 6): "is longer than",
    "/".join("a" * 17): "is 17 folders deep",
}


@pytest.mark.parametrize("name", UNSAFE)
def test_a_name_that_could_mean_another_file_is_refused(name):
    with pytest.raises(UnsafeName, match=f"layout has the file name .*which {UNSAFE[name]}") as raised:
        checked_name(name, "layout")
    assert str(raised.value).isprintable()


@pytest.mark.parametrize("name", [*UNSAFE, "lr=1e-5 run.2", "été", "~"])
def test_any_text_becomes_one_part_of_a_path(name):
    part = one_part(name)
    assert checked_name(part, "test") == part
    assert "/" not in part
    assert (part == name) == (name in ("lr=1e-5 run.2", "été"))


def test_a_file_below_a_folder_is_opened_and_a_new_one_is_the_users_alone(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/b").write_bytes(b"content")
    descriptor = open_below(tmp_path, "a/b")
    assert os.read(descriptor, 100) == b"content"
    os.close(descriptor)
    os.close(open_below(tmp_path, "new", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("link", ["link", "folder/file", "dangling"])
def test_links_are_not_followed(tmp_path, link):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/file").write_text("secret")
    (tmp_path / "in").mkdir()
    (tmp_path / "in/link").symlink_to(tmp_path / "outside/file")
    (tmp_path / "in/folder").symlink_to(tmp_path / "outside")
    (tmp_path / "in/dangling").symlink_to(tmp_path / "absent")
    with pytest.raises(UnsafeName, match="links are not followed"):
        open_below(tmp_path / "in", link)
    with pytest.raises(UnsafeName, match="links are not followed"):
        open_below(tmp_path / "in", link, os.O_WRONLY | os.O_CREAT)
    assert (tmp_path / "outside/file").read_text() == "secret"
    assert not (tmp_path / "absent").exists()


def test_a_fifo_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UnsafeName, match="no regular file"):
        open_below(tmp_path, "fifo")
