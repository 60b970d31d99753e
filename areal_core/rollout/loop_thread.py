"""Event loops in threads: the ways in, from code without a loop and from another loop."""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from areal_core.rollout.errors import RolloutStuck

T = TypeVar("T")
UNWIND_S = 5.0  # a coroutine that is cancelled has so long to end


class LoopThread:
    """A thread with an event loop. What its coroutines touch is touched by this one thread only."""

    def __init__(self, name: str = "rollout") -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self.thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Starts the coroutine."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Waits for the coroutine; an interrupt of the waiting thread cancels it.

        Raises:
            RolloutStuck: called on this very thread, say by a workflow: it would wait for itself.
        """
        if threading.current_thread() is self.thread:
            coroutine.close()
            raise RolloutStuck(
                "an episode called its own executor and would wait for itself for ever: await the engine instead"
            )
        future = self.submit(coroutine)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def close(self, timeout_s: float | None = None) -> None:
        """Cancels what still runs, and ends the thread; one that is blocked for longer than `timeout_s` is left behind."""
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


class FewPerTurn:
    """Lets a few coroutines on in each turn of an event loop, so that thousands that become ready at once do not stop it for seconds."""

    def __init__(self, count: int = 8) -> None:
        self._room = asyncio.Semaphore(count)

    async def wait(self) -> None:
        """Returns in one of the next turns."""
        async with self._room:
            await asyncio.sleep(0)


async def run_on(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> T:
    """Awaits a coroutine that runs on another loop, in another thread.

    A caller that is cancelled cancels it, and goes on only when it has ended there: otherwise what it still touches might be closed.
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
