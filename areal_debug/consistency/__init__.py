"""`areal-debug consistency`: compare an engine's logprobs with the model's; text and page."""
