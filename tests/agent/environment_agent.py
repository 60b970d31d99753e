"""An agent for a separate process.

Its client finds the proxy in the environment, and its return value is the reward.
"""

import os

import openai


class EnvironmentAgent:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    async def run(self, data, **extra):
        messages = [{"role": "user", "content": data["ask"]}]
        async with openai.AsyncOpenAI() as client:
            await client.chat.completions.create(model="m", messages=messages)
        if "exit" in data:
            os._exit(data["exit"])
        print("what an agent prints does not disturb the replies")
        return object() if "return" in data else os.getpid() * self.scale
