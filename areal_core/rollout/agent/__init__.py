"""Agents: any object with `async def run(self, data, **extra_kwargs)`, run against a proxy that OpenAI and Anthropic clients speak to."""
