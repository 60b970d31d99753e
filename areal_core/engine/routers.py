"""Choices of experts: kept while an engine samples, replayed while the trainer computes.

```
hidden -> router's logits -> top-k -> weights of the chosen experts -> experts
                               ^ `Choice` keeps it, or puts the recorded experts in its place
```

Engine and trainer compute router logits with other kernels. Where two experts are close they choose
differently, and the log-prob of that token differs by much more than rounding (arXiv 2510.11370,
rollout routing replay). With recorded choices the trainer uses the engine's experts; their weights
come from the trainer's own logits, as the class of the router computes them, so that the router is
trained as before. With recorded weights these are constants, and the router has no gradient.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from areal_core.data.routed_experts import UNKNOWN, RoutingSizes
from areal_core.errors import ModelError

ROUTER_OF_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# Names of the sizes in configs.
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")


def routing_sizes(config: PretrainedConfig) -> RoutingSizes:
    """Return the sizes of a model's choices of experts.

    Raises:
        ModelError: it has no experts.
    """
    text = config.get_text_config()
    num_experts = next((getattr(text, name) for name in NUM_EXPERTS if hasattr(text, name)), None)
    top_k = next((getattr(text, name) for name in TOP_K if hasattr(text, name)), None)
    if not isinstance(num_experts, int) or not isinstance(top_k, int):
        raise _refusal(text.model_type, "its config names no experts of each token")
    return RoutingSizes(text.num_hidden_layers, top_k, num_experts)


def _refusal(family: str, reason: str, option: str = "return_routed_experts") -> ModelError:
    return ModelError(
        f"rollout.{option} is true, and the experts of {family!r} models cannot be replayed, "
        f"because {reason}: set it to false, or train a model of docs/algorithms.md"
    )


def routing_sizes_of(path: str) -> RoutingSizes:
    return routing_sizes(AutoConfig.from_pretrained(path))


class Routers:
    """The routers of a model: they keep their choices, and replay given ones.

    Args:
        model: its routers' forwards are replaced; after tensor parallelism has split it.
        keeps_weights: `choices` has the weights of the experts, too.

    Attributes:
        replayed: the choices for the tokens of the next forwards and of their backwards, int64
            [tokens, layers, top_k], or 2 top_k with weights, `UNKNOWN` where the router chooses
            itself; None for everywhere.
        kept: the choices of the last forward, by layer, as they are replayed.

    Raises:
        ModelError: it has no routers.
    """

    def __init__(self, model: PreTrainedModel, *, keeps_weights: bool = False) -> None:
        self.sizes = routing_sizes(model.config)
        self._keeps_weights = keeps_weights
        self._family = model.config.get_text_config().model_type
        self.replayed: Tensor | None = None
        self.kept: dict[int, Tensor] = {}
        num_routers = 0
        for name, module in model.named_modules():
            layer = ROUTER_OF_LAYER.search(name)
            if layer is not None and type(module).__name__.endswith("Router"):
                module.forward = partial(self._route, int(layer[1]), module.forward)
                num_routers += 1
        if num_routers == 0:
            raise _refusal(self._family, "no module of a layer is a router")

    def replay(self, recorded: Tensor | None, device: torch.device) -> None:
        """Set the choices for the tokens of the next forward.

        Args:
            recorded: `routed_experts` of the tokens; None lets the routers choose.

        Raises:
            ValueError: they are of another model.
        """
        if recorded is not None:
            self.sizes.check(recorded)
            recorded = recorded.to(device, torch.int64)
        self.replayed = recorded

    def choices(self) -> Tensor:
        """Return `routed_experts` of the last forward, [tokens, layers, top_k or 2 top_k].

        They are 0 in layers without experts, as in SGLang's replies.
        """
        num_tokens, width = next(iter(self.kept.values())).shape
        dtype = torch.int32 if self._keeps_weights else torch.int16
        found = torch.zeros(num_tokens, self.sizes.num_layers, width, dtype=dtype)
        for layer, chosen in self.kept.items():
            found[:, layer] = chosen.to(found)
        return found

    def _route(self, layer: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        replayed, top_k = None if self.replayed is None else self.replayed[:, layer], self.sizes.top_k
        choice = Choice(self.sizes, None if replayed is None else replayed[:, :top_k])
        with choice:
            output = forward(*args, **kwargs)
        if choice.chosen is None:
            raise _refusal(self._family, f"the router of layer {layer} has no single top-k over all experts")
        self.kept[layer] = choice.chosen
        has_weights = replayed is not None and replayed.shape[1] > top_k
        if not (has_weights or self._keeps_weights):
            return output
        places = [i for i, found in enumerate(output) if is_weights(found, choice.chosen)]
        if len(places) != 1:
            reason = f"{len(places)} outputs of the router of layer {layer} look like weights, not one"
            raise _refusal(self._family, reason, "return_routed_weights")
        (place,) = places
        weights = output[place]
        if has_weights:
            assert replayed is not None
            given = replayed[:, top_k:].int().view(torch.float32).gather(1, choice.order).to(weights)
            weights = torch.where(given.isnan(), weights, given)
        if self._keeps_weights:
            bits = weights.detach().float().view(torch.int32)
            self.kept[layer] = torch.cat([choice.chosen, bits.to(choice.chosen)], 1)
        return (*output[:place], weights, *output[place + 1 :])


def is_weights(output: Any, chosen: Tensor) -> bool:
    """Whether an output of a router is the weights of the chosen experts."""
    return isinstance(output, Tensor) and output.is_floating_point() and output.shape == chosen.shape


class Choice(TorchFunctionMode):
    """The choice of experts in one forward of a router, by the only top-k over all experts there.

    Args:
        replayed: int64 [tokens, top_k], takes the place of the router's own; None keeps that.

    Attributes:
        chosen: int64 [tokens, top_k]; None until the router has chosen.
        order: places among the replayed ones, int64 [tokens, top_k].
    """

    def __init__(self, sizes: RoutingSizes, replayed: Tensor | None) -> None:
        super().__init__()
        self.sizes = sizes
        self.replayed = replayed
        self.chosen: Tensor | None = None
        self.order: Tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **kwargs or {})
        if func not in (torch.topk, Tensor.topk):
            return found
        scores, size = args[0], (self.sizes.num_experts, self.sizes.top_k)
        if scores.dim() != 2 or (scores.shape[1], found.indices.shape[1]) != size:
            return found  # of groups of experts
        own = self.chosen = found.indices
        if self.replayed is None:
            return found
        chosen = torch.where(self.replayed == UNKNOWN, own, self.replayed)
        # In the router's own order, so that its own experts change no bit.
        self.order = scores.detach().gather(1, chosen).argsort(dim=1, descending=True, stable=True)
        self.chosen = chosen.gather(1, self.order)
        return torch.return_types.topk((scores.gather(1, self.chosen), self.chosen))
