"""Logprobs of the same tokens under other settings: weights, sampling options, images, details."""
