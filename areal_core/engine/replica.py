"""A second, unsharded copy of the model on each rank, for the embedded engine to generate with.

Ranks generate different numbers of tokens. Through FSDP's sharded modules each token would be a
collective, and the ranks would wait for each other indefinitely; a replica generates without
communication. It receives its weights as a server does, in a weight update.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from areal_core.engine.decode_attention import DECODING
from areal_core.engine.errors import ModelError
from areal_core.engine.model import load_model
from areal_core.engine.packed_linear import pack_linear_layers


class Replica:
    """A causal language model in the compute dtype that computes next-token logits.

    Args:
        path: folder of the model, for its config and initial weights.
        dtype: of weights and compute; "auto" for the checkpoint's own.
    """

    def __init__(self, path: str, dtype: torch.dtype | str, device: torch.device) -> None:
        model = load_model(path, dtype=dtype, attn_implementation=DECODING)
        nn.Module.to(model, device)  # `PreTrainedModel.to` is typed for one argument form only
        self.model = model.eval()
        pack_linear_layers(self.model)
        self.device = device
        # Tied weights under each of their names: a checkpoint may have either.
        self._parameters = dict(self.model.named_parameters(remove_duplicate=False))

    @torch.no_grad()
    def load(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy weights in, by name.

        Raises:
            ModelError: the model has no such name, or its tensor has a different shape; the tensors
                before it have been copied.
        """
        for name, tensor in named_tensors:
            parameter = self._parameters.get(name)
            expected = "no such tensor" if parameter is None else f"shape {list(parameter.shape)}"
            if parameter is None or parameter.shape != tensor.shape:  # copy_ would broadcast
                raise ModelError(f"{name} came with shape {list(tensor.shape)}; the model has {expected}")
            parameter.copy_(tensor)

    @torch.no_grad()
    def __call__(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, cache: DynamicCache
    ) -> Tensor:
        """Logits of the token after the last one, [batch, vocab].

        Args:
            input_ids: int64 [batch, new tokens].
            attention_mask: [batch, cached and new tokens], 0 on padding.
            position_ids: int64 [batch, new tokens].
            cache: of keys and values so far; the new tokens are added to it.
        """
        output = self.model(
            input_ids=input_ids.to(self.device),
            attention_mask=attention_mask.to(self.device),
            position_ids=position_ids.to(self.device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]
