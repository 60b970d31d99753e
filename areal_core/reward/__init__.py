"""Verifiable rewards, computed in a process pool with time-outs."""
