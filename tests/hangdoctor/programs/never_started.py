"""The scheduler started two of three ranks: those two wait in the rendezvous.

label: missing_rank
culprits: 2
ranks: 3
starts: 0 1
launch: plain
"""

import torch.distributed as dist
from hang_point import here

here()
dist.init_process_group("gloo")
