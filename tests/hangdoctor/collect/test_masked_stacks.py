"""Stacks of many processes are masked once, and as if each was masked by itself."""

import json

from areal_core.safety.secrets import Masker
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
