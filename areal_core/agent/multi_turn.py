"""Several attempts at one question, in one row of tokens, with feedback after a wrong answer."""

from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from areal_core.agent.chat_template import continuation_tokens
from areal_core.rollout.types import ModelRequest, ModelResponse, TokenSampler
from areal_core.rollout.workflow import RewardFn, conversation_row, episode_sampling, prompt_tokens, reward_of

FEEDBACK = (
    "That is not right, or the answer could not be read. Think again, and give the answer in the same form."
)


class MultiTurnWorkflow:
    """Attempts at the chat in `data["messages"]` until one is rewarded, at most `max_turns`.

    They also end when `gconfig.max_tokens` leaves no space for another one. The row holds all
    attempts; the user's messages between them are outside the loss mask. Its reward is the last
    attempt's, times `turn_discount` for each attempt before it.

    Args:
        reward_fn, gconfig, tokenizer, enable_thinking: as for `RLVRWorkflow`. An attempt is right
            if its reward is above 0.
        max_turns: maximum number of attempts.
        turn_discount: factor for each further attempt.
        feedback: the user's message after a wrong attempt.

    Raises:
        ValueError: `max_turns` is below 1.
    """

    def __init__(
        self,
        reward_fn: RewardFn,
        gconfig: Any,
        tokenizer: PreTrainedTokenizerBase,
        max_turns: int = 2,
        turn_discount: float = 1.0,
        feedback: str = FEEDBACK,
        enable_thinking: bool = False,
    ) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns is {max_turns}; expected at least 1")
        self.sampling = episode_sampling(gconfig, tokenizer)
        self.reward_fn = reward_fn
        self.tokenizer = tokenizer
        self.max_turns = max_turns
        self.turn_discount = turn_discount
        self.feedback = [{"role": "user", "content": feedback}]
        self.template_kwargs = {"enable_thinking": enable_thinking}

    async def arun_episode(self, engine: TokenSampler, data: dict[str, Any]) -> dict[str, Tensor]:
        """Sample the attempts. Returns one row, with the keys of `episode_tensors`.

        Raises:
            ImageError: the chat has pictures.
        """
        prompt = prompt_tokens(self.tokenizer, data["messages"], self.template_kwargs)
        turns: list[ModelResponse] = []
        while True:
            turns.append(await engine.agenerate(ModelRequest(input_ids=prompt, sampling=self.sampling)))
            reward = await reward_of(self.reward_fn, self.tokenizer, self.sampling, turns[-1], data)
            prompt = self._next_prompt(turns[-1])
            if reward > 0 or len(turns) == self.max_turns or len(prompt) >= self.sampling.max_tokens:
                break
        return conversation_row(turns, reward * self.turn_discount ** (len(turns) - 1))

    def _next_prompt(self, turn: ModelResponse) -> list[int]:
        tokens = turn.input_tokens + turn.output_tokens
        return tokens + continuation_tokens(self.tokenizer, self.feedback, tokens[-1], self.template_kwargs)
