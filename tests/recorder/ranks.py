"""Ranks of a run as threads of this process."""

import threading


def on_ranks(num_ranks, work):
    """Call `work(rank)` in a thread per rank; return the exception of each, or None."""
    errors = [None] * num_ranks

    def run(rank):
        try:
            work(rank)
        except Exception as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return errors
