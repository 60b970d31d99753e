"""Compare engine and trainer logprobs token by token, and name the cause of a difference."""
