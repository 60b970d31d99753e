"""Stacks of many processes are masked once, and as if each was masked by itself."""

import json
from pathlib import Path

from areal_core.safety.secrets import Masker
from hangdoctor.collect.evidence import source_lines
from hangdoctor.collect.pyspy import StackMasker

SECRET = "hf_" + "q7Yx2" * 8


def document(pid: int, file: str = "/job/train.py", name: str | None = "MainThread") -> str:
    """Return what py-spy prints for a process with one thread."""
    frame = {
        "name": "step",
        "filename": file,
        "module": None,
        "short_filename": "train.py",
        "line": 3,
        "locals": None,
    }
    thread = {"pid": pid, "thread_id": 140_000_000_000_000 + pid, "thread_name": name, "os_thread_id": pid,
              "active": True, "owns_gil": False, "frames": [frame]}  # fmt: skip
    return json.dumps([thread, thread | {"os_thread_id": None}], indent=2)


class CountingMasker(Masker):
    """A masker that counts the documents it is given."""

    num_documents = 0

    def document(self, text: str) -> str:
        self.num_documents += 1
        return super().document(text)


def test_equal_stacks_are_masked_once_and_keep_their_numbers() -> None:
    mask = CountingMasker()
    stacks = StackMasker(mask)
    for pid in (17, 18, 4711):
        assert stacks.document(document(pid)) == json.dumps(json.loads(document(pid)))
    assert mask.num_documents == 1
    assert stacks.document(document(17, name="other")) == json.dumps(json.loads(document(17, name="other")))
    assert mask.num_documents == 2


def test_a_secret_is_masked_and_counted_in_every_document() -> None:
    mask, alone = Masker(), Masker()
    stacks = StackMasker(mask)
    secret = [document(pid, file=f"/cache/{SECRET}/train.py") for pid in (17, 18)]
    for text in secret:
        assert stacks.document(text) == alone.document(text)
        assert SECRET not in stacks.document(text)
        alone.document(text)
    assert mask.count == alone.count == 8  # two threads, two documents, twice


def test_a_secret_that_is_learned_later_is_masked_in_stacks_that_were_clean() -> None:
    mask = Masker()
    stacks = StackMasker(mask)
    text = document(17, name="worker s3cr3t-value-9")
    assert "s3cr3t-value-9" in stacks.document(text)
    mask.text("password=s3cr3t-value-9")
    assert json.loads(stacks.document(text))[0]["thread_name"] == "worker ***"


def test_a_secret_number_and_text_that_is_no_json_are_masked_as_by_the_masker() -> None:
    for text in ('[{"secret_id": 1234567890, "pid": 5}]', f'"pid": 5 {SECRET}', "", "[]"):
        mask, alone = Masker(), Masker()
        assert StackMasker(mask).document(text) == alone.document(text)


def test_source_lines_are_those_of_all_stacks(tmp_path: Path) -> None:
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text("a = 1\nb = 2\n    c = 3\n")
    other.write_text("\n\nlock.acquire()\n")
    dumps = [document(17, file=str(one)), document(18, file=str(one)), document(18, file=str(other))]
    assert source_lines(dumps) == {f"{one}:3": "c = 3", f"{other}:3": "lock.acquire()"}
