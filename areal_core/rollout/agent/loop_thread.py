"""An event loop in a thread of its own: coroutines go in from any thread, and nothing is left when it is closed."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines on one event loop, in a daemon thread with this name."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self.thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Starts a coroutine; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Awaits a coroutine that runs on this thread's loop; for callers on another one."""
        return await asyncio.wrap_future(self.submit(coroutine))

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancels what still runs and ends the thread; one that blocks for longer than `timeout_s` is left behind."""
        if self.loop.is_closed():
            return
        self.loop.call_soon_threadsafe(self.loop.create_task, self._end())
        self.thread.join(timeout_s)
        if not self.thread.is_alive():
            self.loop.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self.loop.shutdown_asyncgens()
        self.loop.stop()
