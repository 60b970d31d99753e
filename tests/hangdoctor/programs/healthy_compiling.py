"""A long first step: every rank traces and compiles the model, and no collective has happened yet.

label: healthy
ranks: 2
"""

import torch
import torch.distributed as dist
from hang_point import here
from torch import nn


def compile_and_run(num_layers: int) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(num_layers)])
    torch.compile(model, backend="eager")(torch.ones(2, 8))


dist.init_process_group("gloo")
compile_and_run(num_layers=1)
here()
while True:
    compile_and_run(num_layers=40)
