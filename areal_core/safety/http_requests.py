"""Which HTTP requests a server of ours answers at all: none that a web page makes a browser send.

A browser on a machine that reaches the server sends what any web page asks it to send, but it says
so: in `Origin`, in `Sec-Fetch-Site`, and, if the page's own name was made to point here, in `Host`.
Other programs send none of the first two, and reach a server by its address or by its name.
"""

import ipaddress
import os
import socket
from dataclasses import dataclass
from typing import Protocol

HOSTS_VARIABLE = "AREAL_HTTP_HOSTS"  # further names of this machine, separated by commas
# Nobody can own a domain that ends so.
RESERVED = (".localhost", ".local", ".internal", ".localdomain", ".home.arpa")
JSON_TYPES = ("application/json", "text/json")


@dataclass(frozen=True)
class Refusal:
    """The status and the reason of a request that is not answered."""

    status: int
    reason: str


class Headers(Protocol):
    """Headers of a request, by names in any case."""

    def get(self, name: str, default: str, /) -> str:
        """Return the value of a header."""


def refusal_of(method: str, headers: Headers, listens_at: str) -> Refusal | None:
    """Return why a request is refused, or None.

    `listens_at` is the interface of the server; on loopback it answers loopback names only.
    """
    host = headers.get("Host", "")
    if not is_known_host(host, listens_at):
        names = f"add its name to {HOSTS_VARIABLE}, separated by commas, if it is one of this machine"
        return Refusal(403, f"the request was sent to the host {host[:100]!r}: {names}")
    origin = headers.get("Origin", "")
    if origin and origin.partition("://")[2].lower() != host.lower():
        return Refusal(
            403, f"the request comes from a page of {origin[:100]!r}, which may not use this server"
        )
    is_link = method == "GET" and headers.get("Sec-Fetch-Mode", "") == "navigate"  # shown, not read
    if not is_link and headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        return Refusal(403, "the request comes from a page of another site, which may not use this server")
    kind = headers.get("Content-Type", "").partition(";")[0].strip().lower()
    is_json = kind in JSON_TYPES or (kind.startswith("application/") and kind.endswith("+json"))
    if method not in ("GET", "HEAD", "OPTIONS") and kind and not is_json:
        return Refusal(415, f"the Content-Type is {kind[:100]!r}; expected application/json")
    return None


def is_known_host(header: str, listens_at: str) -> bool:
    """Return whether a `Host` header is an address or a name of this machine.

    Addresses are always: a page of another site has a name. So are names without a dot, names below
    domains that nobody can own, the host name, and those in `AREAL_HTTP_HOSTS`.
    """
    name = host_of(header)
    if not name:
        return False
    if name in os.environ.get(HOSTS_VARIABLE, "").lower().split(","):
        return True
    if is_loopback(listens_at):
        return is_loopback(name) or name.endswith(".localhost")
    if is_address(name) or "." not in name or name.endswith(RESERVED):
        return True
    return name in (socket.gethostname().lower(), listens_at.lower())


def host_of(header: str) -> str:
    """Return the name or address of a `Host` header, in lower case, without the port and `[]`."""
    host = header.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)
