"""Engine logprobs against trainer logprobs, token by token, and the name of the cause of a difference."""
