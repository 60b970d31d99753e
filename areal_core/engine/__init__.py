"""FSDP2: the model, its sharding, the step, logprobs, the optimizer, checkpoints."""
