"""Rollouts: inference engines, workflows, and the sources of training batches."""
