"""Logprobs of the same tokens under other settings: weights, images, architecture."""
