"""Archives that somebody forged: each is refused in one sentence before it does any harm."""

import json
import os
import re
import shutil
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import zarr
from crc32c import crc32c
from numcodecs import blosc, zstd

from recorder import DamagedRecord, RecordError, RecordNotFound, open_record, verify
from recorder.archive.extract import extract_record
from recorder.archive.pack import archive_record, zip_folder
from recorder.archive_storage import open_archive
from recorder.testing import write_scripted_record


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    folder = tmp_path_factory.mktemp("honest")
    write_scripted_record(folder / "record")
    archive_record(folder / "record", folder / "a")
    return folder / "a"


@pytest.fixture
def archive(honest, tmp_path):
    shutil.copytree(honest, tmp_path / "a")
    return tmp_path / "a"


def layout_of(archive: Path, folder: str) -> dict[str, list[list[object]]]:
    layout = open_archive(str(archive)).read_layout(folder)
    return {name: [list(vars(part).values()) for part in parts] for name, parts in layout.items()}


def append(archive: Path, array: str, data: bytes) -> list[object]:
    """Append bytes to an array of the archive; return the part that refers to them."""
    values = zarr.open_array(archive, path=array, mode="r+")
    begin = values.shape[0]
    values.append(np.frombuffer(data, values.dtype))
    return [array, begin, len(data), "U8"]


def forge(archive: Path, folder: str, layout: object) -> None:
    """Replace the layout of a folder by any JSON."""
    part = append(archive, "all/documents", json.dumps(layout).encode())
    zarr.open_group(archive, path=folder, mode="r+").attrs["layout"] = part


def edit_metadata(archive: Path, array: str, **members: object) -> None:
    file = archive / array / "zarr.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | members))


def read_all(archive: Path) -> None:
    """Read as the verbs do: every step, every array, every file."""
    record = open_record(archive)
    for step in record.steps:
        record.step(step).batch(0)
    extract_record(archive, archive.with_name("out"))


@pytest.mark.parametrize(
    "name", ["../" * 40 + "{target}", "{target}", "a/../../b", "a\x1b]0;t", "./a", "a\x00b"]
)
@pytest.mark.parametrize("folder", ["", "steps/000002"])
def test_no_name_of_a_layout_leaves_the_folder(archive, tmp_path, name, folder):
    victim = tmp_path / "victim"
    victim.write_text("original")
    name = name.format(target=victim if name == "{target}" else str(victim)[1:])
    written = append(archive, "all/documents", b"ATTACKER")
    forge(archive, folder, layout_of(archive, folder) | {name: [written]})
    with pytest.raises(DamagedRecord, match="file name") as refused:
        read_all(archive)
    assert victim.read_text() == "original"
    assert "\x1b" not in str(refused.value)
    assert sorted(os.listdir(tmp_path)) == ["a", "victim"]


@pytest.mark.parametrize(
    "part",
    [
        ["../../victim", 0, 1, "U8"],
        ["/etc/passwd", 0, 1, "U8"],
        ["all/documents", -1, 5, "U8"],
        ["all/documents", 0, 10**15, "U8"],
        ["all/documents", 0, True, "U8"],
        ["all/documents", 0, 1e3, "U8"],
        ["all/documents", 0, 1, "X9"],
        ["all/documents", 0, 1, "F32"],
        ["all/absent", 0, 1, "U8"],
        ["all", 0, 1, "U8"],
        ["all/documents", 0],
        None,
        {"a": 1},
    ],
)
def test_a_part_lies_in_an_array_of_the_archive(archive, part):
    forge(archive, "steps/000002", layout_of(archive, "steps/000002") | {"note.txt": [part]})
    with pytest.raises(DamagedRecord, match="steps/000002"):
        read_all(archive)


@pytest.mark.parametrize("depth", [2_000, 200_000])
def test_deep_json_is_refused(archive, depth):
    part = append(archive, "all/documents", b"[" * depth + b"]" * depth)
    zarr.open_group(archive, path="steps/000002", mode="r+").attrs["layout"] = part
    with pytest.raises(DamagedRecord, match="steps/000002"):
        read_all(archive)
    (archive / "zarr.json").write_text("[" * depth + "]" * depth)
    with pytest.raises(DamagedRecord, match=r"zarr\.json"):
        read_all(archive)


@pytest.mark.parametrize(
    ("array", "members"),
    [
        ("all/rewards.F32", {"data_type": "string"}),
        ("all/rewards.F32", {"data_type": {"name": "fixed_length_utf32", "configuration": {}}}),
        ("all/rewards.F32", {"shape": [3, 3]}),
        ("all/rewards.F32", {"shape": [-1]}),
        ("all/rewards.F32", {"shape": ["9"]}),
        ("all/rewards.F32", {"zarr_format": 2}),
        ("all/rewards.F32", {"node_type": "group"}),
        ("all/rewards.F32", {"codecs": [{"name": "numcodecs.pickle", "configuration": {}}]}),
        ("all/rewards.F32", {"codecs": []}),
        ("all/rewards.F32", {"fill_value": 7.0}),
        ("all/rewards.F32", {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1 << 40]}}}),
        ("all/rewards.F32", {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [0]}}}),
        ("all/rewards.F32", {"storage_transformers": [{"name": "any"}]}),
    ],
)
def test_only_arrays_that_are_written_are_read(archive, array, members):
    edit_metadata(archive, array, **members)
    with pytest.raises(DamagedRecord):
        read_all(archive)


@pytest.mark.parametrize("inner", ["gzip", "numcodecs.zlib", "vlen-utf8", "transpose"])
def test_only_codecs_that_are_written_are_read(archive, inner):
    document = json.loads((archive / "all/rewards.F32/zarr.json").read_text())
    document["codecs"][0]["configuration"]["codecs"][1]["name"] = inner
    edit_metadata(archive, "all/rewards.F32", codecs=document["codecs"])
    with pytest.raises(DamagedRecord, match=inner):
        read_all(archive)


def test_a_store_of_zarr_2_is_never_decoded(tmp_path):
    """Its filters name codecs that unpickle: `vlen-utf8` of arrays of objects, `pickle`."""
    folder = tmp_path / "a"
    group = zarr.create_group(folder, zarr_format=2, attributes={"areal_debug_archive": 1})
    group.attrs["layout"] = ["all/documents", 0, 1, "U8"]
    with pytest.raises(RecordError):
        open_record(folder)
    with pytest.raises(RecordError):
        verify(folder)


def compressed_bomb(archive: Path, array: str) -> None:
    """Replace an array's shard by one whose first chunk decompresses to 1 GiB of zeros."""
    data = np.zeros(1 << 30, np.uint8)
    codec = "zstd" if array == "all/documents" else "blosc"
    chunk = zstd.compress(data, 1) if codec == "zstd" else blosc.compress(data, b"zstd", 1, 0)
    chunk += struct.pack("<I", crc32c(chunk))
    index = np.full((64, 2), 2**64 - 1, "<u8")
    index[0] = 0, len(chunk)
    (archive / array / "c/0").write_bytes(
        chunk + index.tobytes() + struct.pack("<I", crc32c(index.tobytes()))
    )


@pytest.mark.parametrize("array", ["all/documents", "all/rewards.F32"])
def test_a_chunk_that_decompresses_to_more_than_its_size_is_refused(archive, array):
    compressed_bomb(archive, array)
    tracemalloc.start()
    with pytest.raises(DamagedRecord, match=r"1073741824 bytes|at least 1073741824"):
        read_all(archive)
    assert tracemalloc.get_traced_memory()[1] < 100e6
    tracemalloc.stop()


def test_an_index_that_points_outside_of_its_shard_is_refused(archive):
    file = archive / "all/rewards.F32/c/0"
    for entry in ((0, 2**63), (2**63, 2**63), (10**6, 1), (2**64 - 2, 16)):
        index = np.full((64, 2), 2**64 - 1, "<u8")
        index[0] = entry
        file.write_bytes(bytes(64) + index.tobytes() + struct.pack("<I", crc32c(index.tobytes())))
        with pytest.raises(DamagedRecord, match="points outside"):
            open_record(archive).step(0).batch(0)


@pytest.mark.parametrize(
    "file", ["zarr.json", "all/rewards.F32/zarr.json", "all/rewards.F32/c/0", "steps/000001/zarr.json"]
)
@pytest.mark.parametrize("kind", ["fifo", "link", "folder", "sparse"])
def test_objects_are_regular_files_of_a_plausible_size(archive, tmp_path, file, kind):
    path = archive / file
    path.rename(tmp_path / "moved")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(tmp_path / "moved")
    elif kind == "folder":
        path.mkdir()
    else:
        with path.open("wb") as handle:
            handle.truncate(10**12)
    with pytest.raises(RecordError):
        read_all(archive)


def test_a_fifo_is_no_record(tmp_path):
    os.mkfifo(tmp_path / "a")
    with pytest.raises(RecordNotFound, match="regular file"):
        open_record(tmp_path / "a")


def rezip(source: Path, target: Path, change: object) -> None:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for entry in old.infolist():
            change(new, entry, old.read(entry))


def test_a_zip_file_holds_what_is_written_and_nothing_else(archive, tmp_path):
    zip_folder(archive, tmp_path / "a.zip")
    assert verify(tmp_path / "a.zip").intact

    def copy_and(extra):
        rezip(tmp_path / "a.zip", tmp_path / "b.zip", lambda new, entry, data: new.writestr(entry, data))
        with zipfile.ZipFile(tmp_path / "b.zip", "a") as changed:
            extra(changed)
        with pytest.raises(RecordError) as refused:
            open_record(tmp_path / "b.zip")
        return str(refused.value)

    assert "dot part" in copy_and(lambda new: new.writestr("../x", b""))
    assert "relative" in copy_and(lambda new: new.writestr("/etc/x", b""))
    with pytest.warns(UserWarning, match="Duplicate"):
        assert "twice" in copy_and(lambda new: new.writestr("zarr.json", b"{}"))
    assert "compressed" in copy_and(
        lambda new: new.writestr("bomb", bytes(10**6), compress_type=zipfile.ZIP_DEFLATED)
    )


def test_a_zip_file_that_lies_about_its_entries_is_refused(archive, tmp_path):
    zip_folder(archive, tmp_path / "a.zip")
    data = bytearray((tmp_path / "a.zip").read_bytes())
    headers = [match.start() for match in re.finditer(b"PK\x01\x02", bytes(data))]

    def refused(at: int, value: bytes) -> str:
        changed = data.copy()
        changed[at : at + len(value)] = value
        (tmp_path / "b.zip").write_bytes(changed)
        with pytest.raises(RecordError) as error:
            read_all(tmp_path / "b.zip")
        return str(error.value)

    last = headers[-1]
    assert "encrypted" in refused(last + 8, b"\x01\x00")
    assert "lies about its size" in refused(last + 24, b"\xff\xff\xff\x7f")
    assert "beyond the file" in refused(last + 20, b"\xff\xff\xff\x7f" * 2)
    assert "overlaps" in refused(last + 42, bytes(4))
