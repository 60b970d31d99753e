"""Evidence around a process (GPUs, RAS, error files, environments), from tool stand-ins."""

import socket
import threading
import time

import pytest

from hangdoctor.collect import evidence


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """Put a script alone on PATH (with the system's own folders of shell tools)."""

    def put(name, text):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")

    return put


@pytest.mark.parametrize(
    "program",
    [
        "sleep 60 & echo '0, 1, 2'; wait",  # killed, and a process that it started holds the pipe
        "setsid sleep 60 & echo '0, 1, 2'",
        "head -c 300000000 /dev/zero",
        "echo 'x, 1, 2'; echo; echo '[Unknown Error], 3'",
    ],
)
def test_a_helper_program_that_hangs_or_floods_is_left(tool, monkeypatch, program):
    monkeypatch.setattr(evidence, "QUICK_S", 0.5)
    tool("nvidia-smi", f"#!/bin/sh\n{program}\n")
    started_at = time.monotonic()
    assert evidence.gpus() == []
    assert time.monotonic() - started_at < 40


def test_ras_is_queried_by_its_tool_where_there_is_one(tool):
    tool("ncclras", '#!/bin/sh\necho "ras says $1"\n')
    assert evidence.nccl_ras() == "ras says -v\n"


def test_ras_is_queried_over_its_socket_otherwise(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(evidence, "RAS_PORT", server.getsockname()[1])

        def answer():
            connection, _ = server.accept()
            with connection:
                assert connection.recv(100) == b"verbose status\n"
                connection.sendall(b"Job summary\n")

        service = threading.Thread(target=answer)
        service.start()
        assert evidence.nccl_ras() == "Job summary\n"
        service.join()
    assert evidence.nccl_ras() is None


def test_environment_is_an_allow_list_without_credentials():
    assert evidence.selected_environment(
        {
            "RANK": "1",
            "MASTER_PORT": "29500",
            "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
            "SLURM_JOB_ID": "7",
            "SLURM_JWT": "x",
            "NCCL_SECRET": "x",
            "HOME": "/root",
            "OPENAI_API_KEY": "x",
            "LD_LIBRARY_PATH": "/x",
        }
    ) == {"MASTER_PORT": "29500", "RANK": "1", "SLURM_JOB_ID": "7", "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}
