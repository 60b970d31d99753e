"""What differs in the code of two runs, which files act on a stage, and each side's own layers."""

from dataclasses import replace

import pytest

from recorder.testing import SCRIPTED_HEADER
from replayer.commits.outside import CodeDifference, code_differences, unknown_code

CODE = {
    "commit": "a" * 40,
    "dirty_sha256": None,
    "dirty_files": {},
    "script": {"path": "/home/a/train.py", "sha256": "1"},
    "local_files": {"rewards.py": "2"},
    "changed_libraries": {"torch": {}, "vllm": None},
}


def header(code=CODE, **environment):
    return replace(
        SCRIPTED_HEADER, environment={"code": code, "libraries": {}, "variables": {}} | environment
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"commit": "b" * 40}, CodeDifference("commit", "commit aaaaaaaaaa in A, bbbbbbbbbb in B")),
        (
            {"dirty_sha256": "9", "dirty_files": {"core/loss.py": "9"}},
            CodeDifference("commit", "uncommitted changes of core/loss.py in B", "core/loss.py"),
        ),
        (
            {"script": {"path": "/home/b/train.py", "sha256": "9"}},
            CodeDifference("script", "the script /home/b/train.py", "/home/b/train.py"),
        ),
        ({"script": {"path": "/home/b/train.py", "sha256": "1"}}, None),
        ({"script": None, "local_files": {}}, None),  # of a replay
        (
            {"local_files": {"rewards.py": "9"}},
            CodeDifference("script", "rewards.py, which the script uses", "rewards.py"),
        ),
        (
            {"changed_libraries": {"torch": {"torch/optim/adam.py": "9"}, "vllm": {"vllm/a.py": "9"}}},
            CodeDifference(
                "library", "torch/optim/adam.py in B is not the file of torch's wheel", "torch/optim/adam.py"
            ),
        ),
    ],
)
def test_code_that_differs_is_named(change, expected):
    assert code_differences(header(), header(CODE | change)) == (() if expected is None else (expected,))


def test_versions_and_variables_that_differ_are_named_with_their_values():
    left = header(libraries={"torch": "2.1"}, variables={"BONUS": None, "OMP_NUM_THREADS": "1", "OLD": "1"})
    right = header(libraries={"torch": "2.2", "vllm": "1"}, variables={"BONUS": "0.25"})
    assert [(found.kind, found.what) for found in code_differences(left, right)] == [
        ("library", "torch 2.1 in A, 2.2 in B"),
        ("variable", "BONUS is not set in A, 0.25 in B"),
        ("variable", "OMP_NUM_THREADS is 1 in A, not set in B"),
    ]


def test_nothing_differs_from_a_record_that_lacks_the_facts_and_they_are_listed():
    old = header({"commit": "a" * 40, "dirty_sha256": None})
    assert code_differences(header(), old) == ()
    assert unknown_code(header(), old) == (
        "which files had uncommitted changes of B",
        "the user's script of B",
        "the files that the script imports of B",
        "whether installed libraries were changed of B",
    )
    dirty = header({"commit": "a" * 40, "dirty_sha256": "9"})
    (found,) = code_differences(header(), dirty)
    assert (found.kind, found.file) == ("commit", None)
