"""HTTP with an engine: one session, JSON in and out, one-sentence errors."""

import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from consistency.engine.reply import Pictures
from consistency.errors import EngineError

MESSAGE_LIMIT = 300
TIMEOUT_S = 600.0


def base_url(text: str) -> str:
    """Turn `host:port` or a URL, with or without `/v1`, into a URL without a path.

    Raises EngineError.
    """
    url = text if "://" in text else f"http://{text}"
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise EngineError(f"engine {text!r} is not an address: write http://host:port")
    return f"{parts.scheme}://{parts.netloc}"


@dataclass(frozen=True)
class HttpClient:
    """A server's address with an open session."""

    address: str
    session: aiohttp.ClientSession

    async def get(self, path: str) -> Any | None:
        """Return the JSON of a 200 reply, None for another status.

        Raises EngineError without a reply.
        """
        status, body = await self._exchange("GET", path, None)
        return parse_json(f"{self.address}{path}", body) if status == 200 else None

    async def post(self, path: str, payload: Any) -> Any:
        """Return the JSON of a 200 reply. Raises EngineError."""
        status, body = await self._exchange("POST", path, payload)
        if status != 200:
            raise EngineError(f"{self.address}{path} answered {status}: {body[:MESSAGE_LIMIT]}")
        return parse_json(f"{self.address}{path}", body)

    async def _exchange(self, method: str, path: str, payload: Any) -> tuple[int, str]:
        try:
            async with self.session.request(method, self.address + path, json=payload) as reply:
                return reply.status, await reply.text()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise EngineError(
                f"no answer from {self.address}{path} ({type(error).__name__}: {error}): is the server up?"
            ) from error


def refuse_pictures(address: str, pictures: Pictures | None) -> None:
    """Raise EngineError for images, which only SGLang's `/generate` takes together with ids."""
    if pictures is not None:
        raise EngineError(
            f"{address} takes no images with token ids: give text prompts, or serve the model with SGLang"
        )


def parse_json(source: str, body: str) -> Any:
    """Parse a JSON text. Raises EngineError."""
    try:
        return json.loads(body)
    except ValueError as error:
        raise EngineError(f"{source} did not answer with JSON: {body[:MESSAGE_LIMIT]!r}") from error


def open_session() -> aiohttp.ClientSession:
    """Open a session without a connection limit; the caller limits its requests."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=TIMEOUT_S, sock_connect=10.0),
        connector=aiohttp.TCPConnector(limit=0),
    )
