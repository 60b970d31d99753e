"""Any OpenAI-compatible completions route. It tells tokens as text; the tokenizer finds their ids, and says when it cannot."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from consistency.engine.reply import Identity, Law, Reply
from consistency.engine.wire import Wire
from consistency.errors import EngineError

AMBIGUOUS = -1


@dataclass(frozen=True)
class OpenAI:
    """A server of `/v1/completions`. `ids` maps a token's text to its id, or to AMBIGUOUS where several decode to it."""

    wire: Wire
    identity: Identity
    model: str
    ids: Mapping[str, int]

    @property
    def address(self) -> str:
        """Where it is."""
        return self.wire.address

    async def sample(self, prompt_ids: Sequence[int], law: Law) -> Reply:
        """One completion. The dialect has no top_k."""
        if law.top_k is not None:
            raise EngineError(
                f"{self.address} speaks OpenAI's dialect, which has no top_k ({law.top_k}): leave it out"
            )
        payload = {
            "model": self.model,
            "prompt": list(prompt_ids),
            "temperature": law.temperature,
            "top_p": law.top_p,
            "max_tokens": law.max_new_tokens,
            "logprobs": 1,
        }
        return parse_reply(self.address, await self.wire.post("/v1/completions", payload), self.ids)

    async def rescore(self, input_ids: Sequence[int], num_prompt: int) -> tuple[float, ...]:
        """Echoes the prompt, which few servers still do with logprobs."""
        payload = {
            "model": self.model,
            "prompt": list(input_ids),
            "temperature": 1.0,
            "max_tokens": 0,
            "echo": True,
            "logprobs": 1,
        }
        answer = await self.wire.post("/v1/completions", payload)
        try:
            values = answer["choices"][0]["logprobs"]["token_logprobs"]
            return tuple(float(value) for value in values[num_prompt : len(input_ids)])
        except (IndexError, KeyError, TypeError) as error:
            raise EngineError(f"{self.address}/v1/completions does not echo logprobs ({error!r})") from error


def ids_of_texts(decode: Any, vocabulary_size: int) -> dict[str, int]:
    """Text to id, over all tokens. Byte pieces that decode to the replacement character share it, and are ambiguous."""
    found: dict[str, int] = {}
    for token in range(vocabulary_size):
        text = decode([token])
        found[text] = AMBIGUOUS if text in found else token
    return found


def parse_reply(address: str, answer: Any, ids: Mapping[str, int]) -> Reply:
    """A completion whose tokens are texts, or `token_id:123`. Raises EngineError."""
    try:
        told = answer["choices"][0]["logprobs"]
        texts = [str(text) for text in told["tokens"]]
        logprobs = tuple(float("nan") if value is None else float(value) for value in told["token_logprobs"])
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise EngineError(
            f"{address}/v1/completions gave no logprobs ({error!r}): it must answer logprobs=1"
        ) from error
    return Reply(tuple(id_of_text(address, text, ids) for text in texts), logprobs)


def id_of_text(address: str, text: str, ids: Mapping[str, int]) -> int:
    """The id of a token's text. Raises EngineError when no token, or more than one, decodes to it (R23)."""
    number = text.removeprefix("token_id:")
    if number != text and number.isdecimal():
        return int(number)
    if text not in ids:
        raise EngineError(
            f"{address} sampled {text!r}, which is no token of the model's tokenizer: the tokenizers differ"
        )
    if ids[text] == AMBIGUOUS:
        raise EngineError(
            f"{address} sampled {text!r}, which several tokens decode to: "
            "use the engine's own route, which tells ids (SGLang /generate, vLLM return_token_ids)"
        )
    return ids[text]
