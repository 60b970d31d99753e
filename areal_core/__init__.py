"""A small, complete core for reinforcement learning of language models, on FSDP2 and SGLang."""
