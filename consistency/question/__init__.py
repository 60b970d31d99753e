"""Two records sampled other tokens from equal weights, seed and prompts: which engine, and why."""

from consistency.question.ask import EngineAnswer, ask_engine

__all__ = ["EngineAnswer", "ask_engine"]
