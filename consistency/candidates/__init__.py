"""What an engine may have held or seen instead, scored until one explains its logprobs."""
