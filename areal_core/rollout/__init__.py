"""Rollouts: prompts through workflows and an engine, and the sources of training batches."""
