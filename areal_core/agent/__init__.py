"""Agents: objects with `async def run(self, data, **extra_kwargs)`, which call a proxy."""
