"""Comparison of engine and trainer logprobs, token by token: a package of areal-debug."""
