"""Record or replay a run of two processes: `trl_ranks.py record|replay|change MODEL FOLDER`."""

import sys
from pathlib import Path

import trl_runs

from areal_debug.trl import record, replay

verb, model, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
options = {"scale_rewards": "none"} if verb == "change" else {}
trainer = trl_runs.grpo(
    model,
    folder / f"out-{verb}",
    per_device_train_batch_size=2,
    ddp_backend="gloo",
    gradient_checkpointing=False,
    **options,
)
if verb == "record":
    record(trainer, folder / "record")
    trainer.train()
else:
    replay(trainer, folder / "record")
