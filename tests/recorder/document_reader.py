"""A reader of records, written from FORMAT.md alone: it imports nothing of the suite."""

import hashlib
import json
import re

import numpy as np
from crc32c import crc32c


def read_sealed(file):
    """Rule 3: checksummed JSON; return the object and the bytes of the file."""
    data = file.read_bytes()
    body, crc = re.fullmatch(rb'(.*),\n "crc32c": "([0-9a-f]{8})"\n}\n', data, re.DOTALL).groups()
    assert f"{crc32c(body):08x}" == crc.decode()
    return json.loads(data), data


def read_by_the_document(record):
    """Read every step with nothing but the document: yield step.json, arrays by file and key."""
    assert read_sealed(record / "record.json")[0]["format_version"] == 2
    has_gaps = (record / "gaps.json").exists()
    removed = read_sealed(record / "gaps.json")[0]["removed"] if has_gaps else []
    last = None
    for folder in sorted((record / "steps").iterdir()):
        step, data = read_sealed(folder / "step.json")
        assert f"{step['step']:06d}" == folder.name
        if last is not None:
            assert step["previous"] == last
        elif step["previous"] is not None:
            assert any(first <= step["previous"]["step"] <= end for first, end in removed)
        last = {"step": step["step"], "sha256": hashlib.sha256(data).hexdigest()}
        for name, entry in step["files"].items():
            content = (folder / name).read_bytes()
            assert (len(content), f"{crc32c(content):08x}") == (entry["size_bytes"], entry["crc32c"])
        arrays = {}
        for name, entry in step["batches"].items():
            content = (folder / name).read_bytes()
            assert f"{crc32c(content[: entry['header_bytes']]):08x}" == entry["header_crc32c"]
            for key, tensor in entry["tensors"].items():
                raw = content[tensor["offset"] :][: tensor["size_bytes"]]
                assert f"{crc32c(raw):08x}" == tensor["crc32c"]
                kind, bits = {"I": "i", "U": "u", "F": "f"}[tensor["stored"][0]], int(tensor["stored"][1:])
                values = np.frombuffer(raw, f"<{kind}{bits // 8}").reshape(tensor["shape"])
                arrays[name, key] = values
        yield step, arrays
    assert read_sealed(record / "end.json")[0]["last"] == last
