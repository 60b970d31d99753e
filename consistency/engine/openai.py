"""OpenAI-compatible completions. Tokens arrive as text; the tokenizer maps them back to ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from consistency.engine.http import HttpClient, refuse_pictures
from consistency.engine.reply import EngineIdentity, Pictures, Reply, SamplingParams
from consistency.errors import EngineError

AMBIGUOUS = -1


@dataclass(frozen=True)
class OpenAI:
    """A server of `/v1/completions`.

    `ids` maps a token's text to its id, or to AMBIGUOUS if several ids decode to it.
    """

    client: HttpClient
    identity: EngineIdentity
    model: str
    ids: Mapping[str, int]

    @property
    def address(self) -> str:
        """Base URL."""
        return self.client.address

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, pictures: Pictures | None = None
    ) -> Reply:
        """Sample one completion. The API has no top_k."""
        refuse_pictures(self.address, pictures)
        if params.top_k is not None:
            raise EngineError(
                f"{self.address} has OpenAI's API, which has no top_k ({params.top_k}): omit it"
            )
        payload = {
            "model": self.model,
            "prompt": list(prompt_ids),
            "temperature": params.temperature,
            "top_p": params.top_p,
            "max_tokens": params.max_new_tokens,
            "logprobs": 1,
        }
        return parse_reply(self.address, await self.client.post("/v1/completions", payload), self.ids)

    async def rescore(
        self, input_ids: Sequence[int], num_prompt: int, pictures: Pictures | None = None
    ) -> tuple[float, ...]:
        """Compute prefill logprobs by echoing the prompt, which few servers still support."""
        refuse_pictures(self.address, pictures)
        payload = {
            "model": self.model,
            "prompt": list(input_ids),
            "temperature": 1.0,
            "max_tokens": 0,
            "echo": True,
            "logprobs": 1,
        }
        answer = await self.client.post("/v1/completions", payload)
        try:
            values = answer["choices"][0]["logprobs"]["token_logprobs"]
            return tuple(float(value) for value in values[num_prompt : len(input_ids)])
        except (IndexError, KeyError, TypeError) as error:
            raise EngineError(f"{self.address}/v1/completions does not echo logprobs ({error!r})") from error


def ids_of_texts(decode: Any, vocabulary_size: int) -> dict[str, int]:
    """Map the text of every token to its id.

    Byte pieces share the replacement character, so they are ambiguous.
    """
    found: dict[str, int] = {}
    for token in range(vocabulary_size):
        text = decode([token])
        found[text] = AMBIGUOUS if text in found else token
    return found


def parse_reply(address: str, answer: Any, ids: Mapping[str, int]) -> Reply:
    """Parse a completion whose tokens are texts or `token_id:123`. Raises EngineError."""
    try:
        entry, usage = answer["choices"][0]["logprobs"], answer.get("usage") or {}
        texts = [str(text) for text in entry["tokens"]]
        logprobs = tuple(float("nan") if value is None else float(value) for value in entry["token_logprobs"])
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise EngineError(
            f"{address}/v1/completions returned no logprobs ({error!r}): it must support logprobs=1"
        ) from error
    return Reply(
        tuple(id_of_text(address, text, ids) for text in texts),
        logprobs,
        num_prompt=usage.get("prompt_tokens"),
        num_output=usage.get("completion_tokens"),
        text=answer["choices"][0].get("text"),
        finish=answer["choices"][0].get("finish_reason"),
    )


def id_of_text(address: str, text: str, ids: Mapping[str, int]) -> int:
    """Return the id of a token's text.

    Raises EngineError unless exactly one token decodes to it.
    """
    number = text.removeprefix("token_id:")
    if number != text and number.isdecimal():
        return int(number)
    if text not in ids:
        raise EngineError(
            f"{address} sampled {text!r}, which is not a token of the model's tokenizer: the tokenizers differ"
        )
    if ids[text] == AMBIGUOUS:
        raise EngineError(
            f"{address} sampled {text!r}, which several tokens decode to: "
            "use the engine's own API, which returns ids (SGLang /generate, vLLM return_token_ids)"
        )
    return ids[text]
