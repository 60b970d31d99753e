"""The scheduler started one of two ranks: that one waits in the rendezvous.

label: missing_rank
culprits: 1
ranks: 2
starts: 0
"""

import torch.distributed as dist
from hang_point import here

here()
dist.init_process_group("gloo")
