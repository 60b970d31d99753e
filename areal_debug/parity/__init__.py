"""`areal-debug parity`: check that training computes a model's own log-probs."""
