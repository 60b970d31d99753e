"""A complete, small, readable core that trains language models with reinforcement learning: FSDP2 and SGLang."""
