"""Requests that a browser sends for a web page are refused; those of other programs are not."""

import tomllib
from pathlib import Path

import pytest

from areal_core.safety.http_requests import HOSTS_VARIABLE, host_of, is_known_host, refusal_of

TABLE = tomllib.loads(Path(__file__).with_name("http_requests.toml").read_text())


class Headers(dict):
    def get(self, name, default):
        return super().get(name.lower(), default)


@pytest.mark.parametrize("row", TABLE["requests"])
def test_requests_of_pages_are_refused(row):
    headers = {"host": "127.0.0.1:80"} | {
        name.replace("_", "-"): text for name, text in row["headers"].items()
    }
    refusal = refusal_of(row.get("method", "POST"), Headers(headers), "127.0.0.1")
    assert (0 if refusal is None else refusal.status) == row["status"]


@pytest.mark.parametrize("listens_at", ["127.0.0.1", "0.0.0.0"])
def test_a_name_that_somebody_else_may_own_is_refused(listens_at):
    hosts = TABLE["own_hosts"] + TABLE["foreign_hosts"]
    assert [host for host in hosts if is_known_host(host, listens_at)] == TABLE["own_hosts"]


def test_the_host_name_and_named_hosts_are_known(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "N1.cluster.edu")
    assert is_known_host("n1.cluster.edu:80", "0.0.0.0")
    monkeypatch.setenv(HOSTS_VARIABLE, "a.example,B.example")
    assert is_known_host("b.example:443", "127.0.0.1")
    assert not is_known_host("c.example", "127.0.0.1")


def test_ports_and_brackets_are_no_part_of_a_host():
    assert [host_of(header) for header in ("A.b.:80", "[::1]:80", "[::1]", "x")] == ["a.b", "::1", "::1", "x"]
