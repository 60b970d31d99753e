"""Two ranks wait in the barrier of a checkpoint; rank 2 is absent and waits for an HTTP response.

label: external_wait
culprits: 2
ranks: 3
"""

import http.client
import socket

import torch.distributed as dist
from hang_point import meet


def generate_answers() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    connection = http.client.HTTPConnection("127.0.0.1", server.getsockname()[1])
    connection.request("POST", "/generate", body="{}")
    connection.getresponse()


def save_checkpoint() -> None:
    dist.barrier()


meet()
if dist.get_rank() == 2:
    generate_answers()
save_checkpoint()
