"""Inference servers as one engine: routing, checks of replies, health, weight updates."""
