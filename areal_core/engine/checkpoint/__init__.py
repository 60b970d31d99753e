"""Checkpoints of sharded models for recovery, and folders in Hugging Face format."""
