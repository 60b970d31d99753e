"""Verifiable rewards, computed in worker processes that can be killed."""

from areal_core.reward.functions import arithmetic_reward_fn, gsm8k_reward_fn, load_reward_fn, no_reward
from areal_core.reward.reward_pool import RewardPool

__all__ = ["RewardPool", "arithmetic_reward_fn", "gsm8k_reward_fn", "load_reward_fn", "no_reward"]
