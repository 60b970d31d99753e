"""Agents that call the model through a proxy of OpenAI's and Anthropic's APIs, as workflows."""

from areal_core.agent.errors import EpisodeFailed

__all__ = ["EpisodeFailed"]
