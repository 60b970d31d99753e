"""Sampling in the trainer's process, and a server with SGLang's routes that starts in seconds."""
