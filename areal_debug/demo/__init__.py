"""The runs of the demo: a tiny model learns to add by SFT, then by GRPO."""
