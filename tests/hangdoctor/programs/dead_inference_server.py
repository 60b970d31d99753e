"""Rank 0 waits for an inference server that accepts and never responds; peers wait for samples.

label: external_wait
culprits: 0
ranks: 2
"""

import socket
import urllib.request

import torch
import torch.distributed as dist
from hang_point import meet


def generate(port: int) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/generate") as answer:
        return answer.read()


meet()
if dist.get_rank() == 0:
    server = socket.create_server(("127.0.0.1", 0))
    generate(server.getsockname()[1])
dist.broadcast(torch.ones(4), src=0)
