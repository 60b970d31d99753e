"""torch.distributed.checkpoint: all ranks finish the last asynchronous save, rank 1's is stuck.

label: checkpoint_stall
culprits: 1
ranks: 2
"""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hang_point import here


class StuckWriter(dcp.FileSystemWriter):
    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> object:
        if dist.get_rank() == 1:
            stuck = Path(tempfile.mkdtemp(), "storage")
            os.mkfifo(stuck)
            stuck.open("wb")
        return super().write_data(plan, planner)


dist.init_process_group("gloo")
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
state = {"w": torch.ones(4) * dist.get_rank()}
pending = dcp.async_save(state, storage_writer=StuckWriter(folder[0]))
here()
pending.result()
