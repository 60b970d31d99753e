"""The roles of a process, which decide the options that must be given and agree.

"train": a run of a trainer; "rollout": rollouts on inference servers, without a trainer.
"""

from typing import Literal

Role = Literal["train", "rollout"]
ROLLOUT_SECTIONS = ("rollout", "gconfig", "sglang", "vllm", "cluster")  # that rollouts alone read
