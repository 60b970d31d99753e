"""Event loops in threads: calls into them from blocking code and from another loop."""

import asyncio
import contextlib
import gc
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from areal_core.rollout.errors import RolloutStuck

T = TypeVar("T")
SHORT_COLLECTIONS = (2_000, 50, 1_000)  # new objects, then collections of each generation
UNWIND_S = 5.0  # time that a cancelled coroutine has to end


class LoopThread:
    """A thread with an event loop. State of its coroutines is accessed by this one thread only."""

    def __init__(self, name: str = "rollout") -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self.thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine and return its result; an interrupt of the waiting thread cancels it.

        Raises:
            RolloutStuck: called on this thread, for example by a workflow: it would wait for
                itself.
        """
        if threading.current_thread() is self.thread:
            coroutine.close()
            raise RolloutStuck(
                "an episode called its own executor and would wait for itself indefinitely: await the engine instead"
            )
        future = self.submit(coroutine)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def close(self, timeout_s: float | None = None) -> None:
        """Cancel all tasks and end the thread, unless it is blocked longer than `timeout_s`."""
        try:
            self.submit(self._cancel_all()).result(timeout_s)
        except TimeoutError:
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def short_collections() -> Iterator[None]:
    """Keep the pauses of Python's garbage collection short in the block.

    A full collection looks through the million objects of torch and Transformers, which are never
    freed, and through those of every episode in flight, and stops all threads for 0.3 to 1 s. So
    what exists now is left out, and the collections are small ones: with 15,000 requests in flight
    the longest delay of the event loop was 115 ms, and 0.2 s or more with other thresholds. What an
    outer block, or the program, has left out already stays so.
    """
    thresholds = gc.get_threshold()
    is_first = not gc.get_freeze_count()
    if is_first:
        gc.collect()
        gc.freeze()
    gc.set_threshold(*SHORT_COLLECTIONS)
    try:
        yield
    finally:
        if is_first:
            gc.unfreeze()
        gc.set_threshold(*thresholds)


class FewPerTurn:
    """Resume few coroutines per turn of an event loop, so that thousands do not block it."""

    def __init__(self, count: int = 8) -> None:
        self._slots = asyncio.Semaphore(count)

    async def wait(self) -> None:
        """Return in one of the next turns."""
        async with self._slots:
            await asyncio.sleep(0)


async def run_on(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine that runs on another loop, in another thread.

    A caller that is cancelled cancels the coroutine, and continues only after it has ended:
    otherwise objects that it still uses might be closed.
    """
    here = asyncio.get_running_loop()
    ended: asyncio.Future[asyncio.Task[T]] = here.create_future()
    started: list[asyncio.Task[T]] = []

    def start() -> None:
        started.append(loop.create_task(coroutine))
        started[0].add_done_callback(lambda task: here.call_soon_threadsafe(settle, task))

    def settle(task: asyncio.Task[T]) -> None:
        if not ended.done():
            ended.set_result(task)

    loop.call_soon_threadsafe(start)
    try:
        task = await asyncio.shield(ended)
    except asyncio.CancelledError:
        loop.call_soon_threadsafe(lambda: started[0].cancel())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended, UNWIND_S)
        raise
    return task.result()
