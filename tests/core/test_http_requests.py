"""Requests that a browser sends for a web page are refused; those of other programs are not."""

import pytest

from areal_core.safety.http_requests import HOSTS_VARIABLE, host_of, is_known_host, refusal_of


class Headers(dict):
    def get(self, name, default):
        return super().get(name.lower(), default)


def refused(method="POST", listens_at="127.0.0.1", **headers: str) -> int | None:
    given = Headers(
        {"host": "127.0.0.1:80"} | {name.replace("_", "-"): text for name, text in headers.items()}
    )
    refusal = refusal_of(method, given, listens_at)
    return None if refusal is None else refusal.status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, None),
        ({"content_type": "application/json; charset=utf-8"}, None),
        ({"content_type": "application/vnd.api+json"}, None),
        ({"content_type": "text/plain"}, 415),
        ({"content_type": "application/x-www-form-urlencoded"}, 415),
        ({"origin": "http://127.0.0.1:80"}, None),
        ({"origin": "http://127.0.0.1:81"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec_fetch_site": "same-origin"}, None),
        ({"sec_fetch_site": "cross-site"}, 403),
        ({"sec_fetch_site": "same-site"}, 403),
        ({"host": ""}, 403),
    ],
)
def test_requests_of_pages_are_refused(headers, status):
    assert refused(**headers) == status


def test_a_link_on_another_page_may_be_followed():
    link = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}
    assert (refused("GET", **link), refused("POST", **link)) == (None, 403)


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", ""])
@pytest.mark.parametrize("listens_at", ["127.0.0.1", "0.0.0.0"])
def test_a_name_that_somebody_else_may_own_is_refused(host, listens_at):
    assert not is_known_host(host, listens_at)


@pytest.mark.parametrize(
    "host", ["127.0.0.1:80", "127.0.0.2", "localhost:1", "LOCALHOST", "[::1]:80", "a.localhost"]
)
def test_loopback_names_are_known(host):
    assert is_known_host(host, "127.0.0.1")
    assert is_known_host(host, "0.0.0.0")


def test_the_host_name_and_named_hosts_are_known(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "N1.cluster.edu")
    assert is_known_host("n1.cluster.edu:80", "0.0.0.0")
    monkeypatch.setenv(HOSTS_VARIABLE, "a.example,B.example")
    assert is_known_host("b.example:443", "127.0.0.1")
    assert not is_known_host("c.example", "127.0.0.1")


def test_ports_and_brackets_are_no_part_of_a_host():
    assert [host_of(header) for header in ("A.b.:80", "[::1]:80", "[::1]", "x")] == ["a.b", "::1", "::1", "x"]
