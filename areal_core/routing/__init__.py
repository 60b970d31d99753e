"""Choices of experts of an engine, which the trainer replays."""
