"""Advice after a refused dump, for literal situations."""

import pytest

from hangdoctor.collect.pyspy import Access, explain_refusal


@pytest.mark.parametrize(
    ("access", "advice"),
    [
        (Access(1, False, 1000, 1000, False), "sudo sysctl kernel.yama.ptrace_scope=0"),
        (Access(0, False, 1000, 0, False), "belongs to uid 0 and this command runs as uid 1000"),
        (Access(2, False, 1000, 1000, False), "ptrace_scope is 2: run this with sudo"),
        (Access(3, True, 0, 0, False), "no process may read it until a reboot"),
        (Access(None, False, 0, 0, True), "docker run --cap-add SYS_PTRACE"),
        (Access(None, False, 0, 0, False), "run this with CAP_SYS_PTRACE"),
    ],
)
def test_refusal_names_the_cause_and_the_remedy(access, advice):
    text = explain_refusal(access)
    assert advice in text
    assert "areal-debug hang watch -- COMMAND" in text
    assert "faulthandler.register(signal.SIGUSR1" in text
