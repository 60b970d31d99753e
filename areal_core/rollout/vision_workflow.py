"""One completion of a chat with pictures, and its reward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from areal_core.data.images import as_image_bytes
from areal_core.data.processor import Prompt, VisionProcessor
from areal_core.engine.vision_models import image_keys
from areal_core.rollout.types import ModelRequest, TokenSampler
from areal_core.rollout.workflow import RewardFn, episode_sampling, episode_tensors, reward_of


class VisionRLVRWorkflow:
    """One completion of the chat in `data["messages"]` with `data["images"]`, and its reward.

    A message has parts `{"type": "image"}`, one for each picture in order, and `{"type": "text"}`.
    `messages` may also be a text, rendered by the chat template with one image token for each
    picture. Pictures are all that `as_image_bytes` takes.

    Args:
        reward_fn, gconfig, tokenizer, enable_thinking: as for `RLVRWorkflow`. An image token is a
            stop token: no model can read one without a picture.
        processor: of the model's pictures.
    """

    def __init__(
        self,
        reward_fn: RewardFn,
        gconfig: Any,
        tokenizer: PreTrainedTokenizerBase,
        processor: VisionProcessor,
        enable_thinking: bool = False,
    ) -> None:
        self.sampling = episode_sampling(gconfig, tokenizer, processor.image_token_id)
        self.reward_fn = reward_fn
        self.tokenizer = tokenizer
        self.processor = processor
        self.enable_thinking = enable_thinking

    async def arun_episode(self, engine: TokenSampler, data: dict[str, Any]) -> dict[str, Tensor]:
        """Sample one completion and compute its reward.

        Returns:
            The row of `episode_tensors`, with `mm_token_type_ids` int32 [1, T] and the pictures.

        Raises:
            ImageError: a picture cannot be read, or pictures and image tokens do not match.
        """
        images = tuple(as_image_bytes(image) for image in data["images"])
        prompt = self._prompt(data["messages"], images)
        request = ModelRequest(
            input_ids=prompt.input_ids,
            sampling=self.sampling,
            images=images,
            image_token_id=self.processor.image_token_id,
        )
        response = await engine.agenerate(request)
        reward = await reward_of(self.reward_fn, self.tokenizer, self.sampling, response, data)
        types = torch.tensor([[*prompt.mm_token_type_ids, *[0] * len(response.output_tokens)]]).int()
        keys = {"mm_token_type_ids": types} | image_keys([images])
        return episode_tensors(response, reward) | keys

    def _prompt(self, messages: Any, images: Sequence[bytes]) -> Prompt:
        if isinstance(messages, str):
            return self.processor.tokenize(messages, images)
        return self.processor.prompt(messages, images, enable_thinking=self.enable_thinking)
