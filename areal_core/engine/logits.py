"""What a model's class does between its hidden states and its logits, besides the output layer.

Cohere multiplies its logits, Granite divides them, Gemma 2 caps them, MiniCPM3 divides the hidden
states; each names its option differently. `measure_logit_map` runs the class's own forward with
both ends replaced: its transformer returns given hidden states and the output layer given logits.
What arrives at the output layer, and what leaves the forward, are the map. No weight is used, so it
also works on "meta".
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from areal_core.errors import ModelError

NUM_POSITIONS = 3  # of the probe
BEYOND_ANY_CAP = 2.0**20  # a logit at which tanh(logit / cap) is 1
LARGEST_ERROR = 1e-2  # of a measured value, relative: bfloat16 rounds to 2^-8


@dataclass(frozen=True)
class LogitMap:
    """logits = cap(factor * layer(input_factor * hidden)), cap(x) = softcap * tanh(x / softcap)."""

    input_factor: float = 1.0
    factor: float = 1.0
    softcap: float | None = None

    def apply(self, logits: Tensor) -> Tensor:
        """Map the outputs of the layer, float32 [..., vocab], to logits."""
        if self.factor != 1.0:
            logits = logits * self.factor
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def output_layer(model: PreTrainedModel) -> nn.Module | None:
    """The layer that computes logits; None in a reward model, which has none."""
    return model.get_output_embeddings()


@torch.no_grad()
def measure_logit_map(model: PreTrainedModel) -> LogitMap:
    """Measure the map of a model with the forward of its class.

    Raises:
        ModelError: the class does more than a `LogitMap` can express.
    """
    layer = output_layer(model)
    if not isinstance(layer, nn.Linear):
        raise _unsupported(model, f"its output layer is {type(layer).__name__}, not a linear layer")
    generator = torch.Generator().manual_seed(0)
    # Values that bfloat16 holds exactly: some classes cast to the dtype of the layer.
    hidden = torch.randn(1, NUM_POSITIONS, layer.in_features, generator=generator).bfloat16().float()
    scales = torch.tensor([2.0**-10, 1.0, BEYOND_ANY_CAP])  # far below a cap, about at it, far above
    given = scales[None, :, None].expand(1, NUM_POSITIONS, layer.out_features)
    arrived: list[Tensor] = []

    def record(features: Tensor) -> Tensor:
        arrived.append(features)
        return given.clone()

    try:
        with (
            replaced_forward(
                transformer(model), lambda *_, **__: _HiddenStates(last_hidden_state=cast(Any, hidden))
            ),
            replaced_forward(layer, record),
        ):
            ids = torch.zeros(1, NUM_POSITIONS, dtype=torch.int64)
            output = type(model).forward(model, input_ids=ids, use_cache=False)
    except (TypeError, AttributeError, KeyError, IndexError, RuntimeError) as error:
        raise _unsupported(model, f"its forward needs more than hidden states ({error})") from error
    if len(arrived) != 1 or output.logits.shape != given.shape:
        raise _unsupported(model, "it does not apply its output layer to each hidden state once")
    input_factor = _ratio(arrived[0].float(), hidden)
    if input_factor is None:
        raise _unsupported(model, "it has further layers between its transformer and its output layer")
    values = output.logits[0, :, 0].float()
    if not bool((output.logits[0].float() == values[:, None]).all()):
        raise _unsupported(model, "it treats some tokens of its vocabulary differently")
    return _fit(model, input_factor, scales.tolist(), values.tolist())


@torch.no_grad()
def transformer(model: PreTrainedModel) -> nn.Module:
    """Return the module that computes hidden states: the one that the class's forward calls.

    It is the base model, or its decoder (OPT); Llama 4 names a base model that it does not have.
    """
    candidates = [model.base_model, getattr(model, "model", model), model.get_decoder()]
    called: list[nn.Module] = []

    class Found(Exception):
        pass

    def stop_at(module: nn.Module) -> Any:
        def forward(*_: Any, **__: Any) -> None:
            called.append(module)
            raise Found

        return forward

    with ExitStack() as stack:
        for module in {id(module): module for module in candidates if module is not model}.values():
            stack.enter_context(replaced_forward(module, stop_at(module)))
        try:
            type(model).forward(model, input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=False)
        except Found:
            return called[0]
        except (TypeError, AttributeError, KeyError, IndexError, RuntimeError):
            pass
    raise _unsupported(model, "it has no separate module that computes hidden states")


def _fit(model: PreTrainedModel, input_factor: float, given: list[float], found: list[float]) -> LogitMap:
    factor = found[0] / given[0]
    is_capped = found[2] < 0.5 * factor * given[2]
    fitted = LogitMap(input_factor, factor, found[2]) if is_capped else LogitMap(input_factor, found[1])
    expected = fitted.apply(torch.tensor(given))
    if not torch.allclose(expected, torch.tensor(found), rtol=LARGEST_ERROR):
        raise _unsupported(model, f"its logits are neither scaled nor soft-capped: {given} become {found}")
    return fitted


def _ratio(values: Tensor, reference: Tensor) -> float | None:
    """Return the factor between two tensors; None if there is no one factor."""
    if values.shape != reference.shape:
        return None
    factor = float((values * reference).sum() / (reference * reference).sum())
    error = (values - factor * reference).abs().max() / reference.abs().max()
    if float(error) > LARGEST_ERROR * abs(factor):
        return None
    return 1.0 if torch.equal(values, reference) else factor


class _HiddenStates(BaseModelOutputWithPast):
    """The output of a transformer; what a class reads besides hidden states is None."""

    def __getattr__(self, name: str) -> None:
        return None


def _unsupported(model: PreTrainedModel, reason: str) -> ModelError:
    return ModelError(
        f"{model.config.model_type!r} models are not supported, because training cannot compute the logits of "
        f"{type(model).__name__}: {reason}; train a model of another family"
    )


@contextmanager
def replaced_forward(module: nn.Module, forward: Any) -> Iterator[None]:
    """Let the module compute `forward` in the body; None for the forward of its class."""
    before = module.__dict__.pop("forward", None)
    if forward is not None:
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        module.__dict__.pop("forward", None)
        if before is not None:
            module.__dict__["forward"] = before
