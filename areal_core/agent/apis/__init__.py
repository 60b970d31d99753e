"""Dialects of the proxy: parse the requests of OpenAI's and Anthropic's APIs, render replies."""
