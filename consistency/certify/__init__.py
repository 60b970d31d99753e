"""Proves or refutes that sampled log-probs equal the trainer's in every bit."""
