"""A job that hangs: rank 0 alone waits at a barrier, while the others reduce gradients.

torchrun --nproc-per-node 3 examples/hang.py &
areal-debug hang
"""

import torch
import torch.distributed as dist


def log_step(step: int) -> None:
    dist.barrier()  # a mistake: only rank 0 logs
    print(f"step {step}")


def main() -> None:
    dist.init_process_group("gloo")
    for step in range(3):
        dist.all_reduce(torch.ones(4))
        if step == 1 and dist.get_rank() == 0:
            log_step(step)


if __name__ == "__main__":
    main()
