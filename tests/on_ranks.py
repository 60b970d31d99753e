"""Call `main` of a module of tests, with arguments that are text, on each rank of a job.

torchrun tests/on_ranks.py MODULE ARGUMENT...    rank 0 prints what `main` returns, as JSON
"""

import importlib
import json
import os
import sys

import torch

from areal_core.engine.ranks import leave_ranks

if __name__ == "__main__":
    torch.set_num_threads(1)
    found = importlib.import_module(sys.argv[1]).main(*sys.argv[2:])
    if os.environ["RANK"] == "0":
        print(json.dumps(found))
    leave_ranks()
