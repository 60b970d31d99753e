"""Removal of steps, and the recorded reason for it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recorder import Retention, StepNotRecorded, open_record, verify
from recorder.retention import steps_to_remove
from recorder.testing import write_scripted_record
from recorder.writer import RecordingOptions

LOTS = 10**12


def removed(limits, num_steps=10, size=10, free=LOTS):
    return steps_to_remove(dict.fromkeys(range(num_steps), size), free, limits)


def test_a_byte_cap_takes_the_oldest_that_is_not_pinned_even_if_every_so_many_are_kept():
    assert removed(Retention(max_bytes=70)) == [0, 1, 2]
    assert removed(Retention(max_bytes=70, keep_every=1, pinned=frozenset({1}))) == [0, 2, 3]
    assert removed(Retention(max_bytes=70, keep_last=8)) == [0, 1, 2]


@given(
    st.sets(st.integers(0, 60), min_size=1),
    st.integers(1, 10) | st.none(),
    st.integers(1, 7) | st.none(),
    st.frozensets(st.integers(0, 60)),
    st.integers(0, 300) | st.none(),
)
def test_limits_hold_and_what_is_pinned_stays(steps, keep_last, keep_every, pinned, max_bytes):
    limits = Retention(keep_last, keep_every, pinned, max_bytes)
    gone = set(steps_to_remove(dict.fromkeys(steps, 10), LOTS, limits))
    left = steps - gone
    assert gone <= steps - pinned - {max(steps)}
    if max_bytes is not None:
        assert len(left) * 10 <= max_bytes or left <= pinned | {max(steps)}
    if keep_last is not None:
        kept = {step for step in left if keep_every and step % keep_every == 0}
        assert len(left - pinned - kept) <= keep_last
    if keep_last is not None and max_bytes is None:
        assert set(sorted(steps)[-keep_last:]) <= left


@pytest.mark.parametrize("queue_steps", [0, 2])
def test_a_record_within_limits_is_intact_and_reports_why_a_step_is_missing(tmp_path, queue_steps):
    limits = Retention(keep_last=3, keep_every=5, pinned=frozenset({2}))
    options = RecordingOptions(queue_steps=queue_steps, retention=limits)
    write_scripted_record(tmp_path / "record", num_steps=12, num_ranks=2, options=options)
    record = open_record(tmp_path / "record")
    assert record.steps == (0, 2, 5, 9, 10, 11)
    assert record.gaps.removed == ((1, 1), (3, 4), (6, 8))
    report = verify(tmp_path / "record")
    assert (report.problems, report.steps_ok, report.steps_missing) == ((), record.steps, ())
    with pytest.raises(
        StepNotRecorded, match=r"step 4 was removed to keep .*: it holds 6 steps from 0 to 11"
    ):
        record.step(4)
