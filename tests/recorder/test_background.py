"""The queue in front of the disk: bounded, and it never hides an error."""

import threading

from recorder.writer import Background


def test_jobs_are_done_in_order_in_a_thread_of_their_own():
    done = []
    background = Background(lambda job: done.append((job, threading.current_thread().name)), depth=3)
    for job in "abc":
        background.put(job)
    assert background.close(10)
    assert done == [("a", "recorder"), ("b", "recorder"), ("c", "recorder")]


def test_the_running_job_counts_and_a_full_queue_accepts_nothing_until_it_is_done():
    may_continue = threading.Event()
    background = Background(lambda job: may_continue.wait(), depth=2)
    background.put(1)
    assert background.has_room
    background.put(2)
    assert not background.has_room
    background.wait(0.01)
    assert not background.has_room
    may_continue.set()
    background.wait(10)
    assert background.has_room
    assert background.close(10)
    assert background.idle


def test_an_error_ends_the_thread_frees_the_queue_and_stays():
    may_continue = threading.Event()

    def work(job):
        may_continue.wait()
        raise OSError(28, "No space left on device")

    background = Background(work, depth=2)
    background.put(1)
    background.put(2)
    may_continue.set()
    assert background.close(10)
    assert background.idle
    assert background.error.errno == 28
    background.put(3)
    assert background.idle


def test_close_gives_up_on_a_disk_that_hangs():
    never = threading.Event()
    background = Background(lambda job: never.wait(), depth=1)
    background.put(1)
    assert not background.close(0.01)
    never.set()
