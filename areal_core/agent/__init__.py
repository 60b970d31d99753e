"""Agents that call the model through a proxy of OpenAI's and Anthropic's APIs, as workflows."""
