"""Two ranks train: forward, backward, gradient reduction, repeated.

label: healthy
ranks: 2
computes: yes
"""

import torch
import torch.distributed as dist
from hang_point import here
from torch import nn


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(16, 32)).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()


dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
train_step(model, optimizer)
here()
while True:
    train_step(model, optimizer)
