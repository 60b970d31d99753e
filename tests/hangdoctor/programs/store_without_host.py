"""The agent that hosts the store is gone: every rank retries its connection indefinitely.

label: init_deadlock
culprits: none
ranks: 2
"""

import os
from datetime import timedelta

import torch.distributed as dist
from hang_point import here

os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
here()
dist.init_process_group("gloo", timeout=timedelta(hours=1))
