"""A headless browser driven by a test: pages, JavaScript expressions, keys.

Speaks Chromium's DevTools protocol over one WebSocket. Replies and events arrive on the same
socket: while it waits for a reply it keeps the page's network requests and script errors.
"""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

from tests.command_line import installed

INSTALL = Path(__file__).with_name("install_chromium.sh")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync")
FLAGS += ("--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0")
TIMEOUT_S = 60.0


class Page:
    """One tab. `requests` are the addresses that it requested, `errors` its script errors."""

    def __init__(self, loop: asyncio.AbstractEventLoop, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._loop, self._socket, self._number = loop, socket, 0
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command of the protocol and return its result."""
        return self._loop.run_until_complete(asyncio.wait_for(self._call(method, params), TIMEOUT_S))

    def open(self, url: str, *, width: int = 1280, height: int = 860, dark: bool = False) -> None:
        """Open a page and wait until it has loaded."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.requests.clear()
        self.errors.clear()
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, awaited if it is a promise."""
        reply = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Wait until a JavaScript condition is true, evaluated once a frame by the page itself."""
        self.evaluate(
            f"new Promise(done => {{ const ask = () => ({condition}) ? done(true) : setTimeout(ask, 16); ask(); }})"
        )

    def press(self, key: str, code: int = 0, modifiers: int = 0) -> None:
        """Press and release a key.

        `code` is its virtual key code, for keys that the browser itself handles.
        """
        text = {"text": key} if len(key) == 1 else {}
        event = {"key": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown", **event, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def hover(self, selector: str) -> None:
        """Move the mouse to the middle of the first element that matches."""
        box = self.evaluate(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])"
            f"(document.querySelector({selector!r}).getBoundingClientRect())"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])

    async def _call(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json()
            if "id" not in message:
                self._note(message["method"], message["params"])
            elif message["id"] == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]

    def _note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))


@contextlib.contextmanager
def browser_page(profile: Path) -> Iterator[Page]:
    """A page of a separate browser, which is ended at teardown."""
    command = [installed(INSTALL), *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        loop = asyncio.new_event_loop()
        try:
            listening = next(filter(None, (re.search(r"ws://([^/]+)/", line) for line in process.stderr)))
            session, socket = loop.run_until_complete(connect(listening[1]))
            try:
                yield Page(loop, socket)
            finally:
                loop.run_until_complete(socket.close())
                loop.run_until_complete(session.close())
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            loop.close()


async def connect(address: str) -> tuple[aiohttp.ClientSession, aiohttp.ClientWebSocketResponse]:
    session = aiohttp.ClientSession()
    async with session.get(f"http://{address}/json") as reply:
        targets = await reply.json()
    page = next(target for target in targets if target["type"] == "page")
    return session, await session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0)
