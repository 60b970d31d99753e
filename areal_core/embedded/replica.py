"""A second, unsharded copy of the model on each rank, for the embedded engine to generate with.

Ranks generate different numbers of tokens. Through FSDP's sharded modules each token would be a
collective, and the ranks would wait for each other indefinitely; a replica generates without
communication. It receives its weights as a server does, in a weight update.

On a CPU two things make it faster than Transformers' own forward:

* Attention of one new token over its cache is two small matrix products. Torch's kernel is made for
  long queries: it needs as many key heads as query heads, so that the cache is copied for every
  token, and processes it in blocks meant for many queries. With 9 heads over 3, 16 rows and 100
  tokens it takes 2.3 ms per layer; this takes 0.24 ms.
* Linear layers compute in bfloat16 with weights in oneDNN's blocked layout. Otherwise every product
  of a few rows reorders its weight again: the layers of SmolLM2-135M take 60 ms for 16 rows, and 38
  ms with reordered weights. These copies need as much memory as the weights. A copy is made again
  when its weight has been written to.
"""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from areal_core.data.processor import VisionProcessor
from areal_core.embedded.cached_rows import CachedRows, PrefixCache
from areal_core.embedded.generate import RoutedCache
from areal_core.engine.attention import attend_rows
from areal_core.engine.model import cache_argument, checkpoint_names, load_model, own_attention, set_attention
from areal_core.engine.parity import DEPENDS_ON_FORWARD, TOLERANCE, random_rows, require_invariant_products
from areal_core.engine.routers import Routers
from areal_core.engine.vision_models import vision_family
from areal_core.errors import ModelError
from areal_core.rollout.errors import UnsupportedSampling

# Names of attention functions in Transformers.
DECODING, DECODING_INVARIANT = "decoding_sdpa", "decoding_invariant_sdpa"
SCORES_AT_A_TIME = 1 << 24  # elements of float32 scores that exist at a time
PREFIX_CACHE_BYTES = 1 << 29
CHECKED = (5, 6)  # tokens of a prompt and of a completion that are checked at load
# Rounding of decoding with a cache, by other kernels; a wrong cache changes log-probs by nats.
DECODING_FACTOR = 50.0
ROWS = 16  # of the batch that the layout is optimised for; it is correct for any number of rows


class Replica:
    """A causal language model in the compute dtype that computes next-token logits.

    Args:
        path: folder of the model, for its config and initial weights.
        dtype: of weights and compute; "auto" for the checkpoint's own.
        processor: of the pictures in prompts; None for a model of text.
        keeps_experts: keep the experts of each token in the cache; then no prefix is kept.
        keeps_weights: and the weights of these experts.
        is_invariant: compute logits whose bits do not depend on the batch, its order or the prefix
            cache; a trainer with `attn_impl=batch_invariant` computes the same.
        prefix_cache_bytes: the most memory of prompts and completions that are kept to be read
            once; 0 for none.

    Raises:
        ModelError: the model cannot be loaded or sampled from, or not with `is_invariant`, or its
            experts cannot be replayed.
    """

    def __init__(
        self,
        path: str,
        dtype: torch.dtype | str,
        device: torch.device,
        processor: VisionProcessor | None = None,
        *,
        keeps_experts: bool = False,
        keeps_weights: bool = False,
        is_invariant: bool = False,
        prefix_cache_bytes: int = PREFIX_CACHE_BYTES,
    ) -> None:
        self.processor, self.is_invariant = processor, is_invariant
        self.prefixes = PrefixCache(prefix_cache_bytes)
        attention = DECODING_INVARIANT if is_invariant else DECODING
        model = load_model(path, dtype=dtype, attn_implementation=attention)
        nn.Module.to(model, device)  # `PreTrainedModel.to` is typed for one argument form only
        self.model = model.eval()
        if own_attention(model) == "eager":  # SDPA leaves out soft caps and sinks
            set_attention(model, "eager")
        pack_linear_layers(self.model)
        self.device = device
        self._routers = Routers(model, keeps_weights=keeps_weights) if keeps_experts else None
        if not is_invariant:
            self.require_parity()
        self._keeps_rows = not keeps_experts and attends_to_all(model) and self.rows_agree()
        if is_invariant:
            require_invariance(self.model, self._keeps_rows, device)
        # Tied weights under each of their names: a checkpoint may have either.
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        names = checkpoint_names(self.model)
        self._parameters = {names.get(name, name): tensor for name, tensor in parameters.items()}
        self._shapes: dict[nn.Parameter, torch.Size] = {}  # of released weights

    @torch.no_grad()
    def require_parity(self) -> None:
        """Check that decoding with a cache and padding gives the logits of the class's own forward.

        Raises:
            ModelError: it does not, as of models with a state besides keys and values.
        """
        config = self.model.config.get_text_config()
        row = random_rows([sum(CHECKED)], config.vocab_size)[0]
        prompt, width = CHECKED[0], CHECKED[0] + 3  # three tokens of padding, as of a shorter prompt
        padded, mask = torch.nn.functional.pad(row[:prompt], (3, 0))[None], torch.ones(1, width + CHECKED[1])
        mask[:, :3] = 0
        mask = mask.to(torch.int64)
        try:
            own = self.model(input_ids=row[None].to(self.device), use_cache=False).logits[0, prompt - 1 : -1]
            cache, positions = DynamicCache(), (mask.cumsum(1) - 1).clamp(min=0)
            found = [self(padded, mask[:, :width], positions[:, :width], cache)]
            for place, token in enumerate(row[prompt:-1].split(1), start=width):
                now = slice(place, place + 1)
                found.append(self(token[None], mask[:, : place + 1], positions[:, now], cache))
            log_p, expected = (logits.float().log_softmax(-1) for logits in (torch.cat(found), own))
            # On average over tokens that may be sampled: of unlikely ones, rounding is larger.
            error = float((expected.exp() * (log_p - expected).abs()).sum(-1).max())
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError) as failure:
            raise ModelError(f"{self._refusal()}: {str(failure).splitlines()[0]}") from failure
        if not bool(own.isfinite().all()):
            raise ModelError("the model's logits are not finite: its weights are damaged")
        if not error <= DECODING_FACTOR * TOLERANCE[self.model.dtype]:
            raise ModelError(f"{self._refusal()}: its log-probs would be wrong by {error:.2g} nats")

    @torch.no_grad()
    def rows_agree(self) -> bool:
        """Return whether `CachedRows` of two lengths get the logits of the model's forward."""
        row = random_rows([sum(CHECKED)], self.model.config.get_text_config().vocab_size)[0]
        own = self.model(input_ids=row[None].to(self.device), use_cache=False).logits[0]
        starts = (CHECKED[0], 2)
        try:
            rows = CachedRows(
                self.model,
                [row[:start].tolist() for start in starts],
                PrefixCache(0),
                is_invariant=self.is_invariant,
            )
            found = [rows.logits]
            for step in range(CHECKED[1] - 1):
                rows.read(torch.stack([row[start + step] for start in starts]), [True, True])
                found.append(rows.logits)
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError):
            return False
        log_p = torch.stack(found, 1).float().log_softmax(-1)  # [2, steps, vocab]
        expected = torch.stack([own[start - 1 :][: CHECKED[1]] for start in starts]).float().log_softmax(-1)
        error = float((expected.exp() * (log_p - expected).abs()).sum(-1).max())
        return error <= DECODING_FACTOR * TOLERANCE[self.model.dtype]

    def _refusal(self) -> str:
        family = self.model.config.get_text_config().model_type
        return f"the embedded engine cannot sample from {family!r} models, use sglang in allocation_mode"

    @torch.no_grad()
    def load(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy weights in, by name.

        Raises:
            ModelError: the model has no such name, or its tensor has a different shape; the tensors
                before it have been copied.
        """
        self.prefixes.clear()
        for name, tensor in named_tensors:
            parameter = self._parameters.get(name)
            expected = "no such tensor" if parameter is None else f"shape {list(parameter.shape)}"
            if parameter is None or parameter.shape != tensor.shape:  # copy_ would broadcast
                raise ModelError(f"{name} came with shape {list(tensor.shape)}; the model has {expected}")
            parameter.copy_(tensor)

    def release(self) -> None:
        """Free the memory of the weights and of their reordered copies; the values are lost."""
        for module in self.model.modules():
            if isinstance(module.forward, PackedForward):
                module.forward.packed = None
        for parameter in self.model.parameters():
            self._shapes[parameter] = parameter.shape
            parameter.data = parameter.data.new_empty(0)

    def allocate(self) -> None:
        """Allocate the memory of released weights again; they are not a number until `load`."""
        for parameter, shape in self._shapes.items():
            parameter.data = parameter.data.new_full(shape, torch.nan)

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
            **{cache_argument(type(self.model).forward): cache},
            use_cache=True,
            logits_to_keep=1,
        )
        self._add_experts(cache, input_ids)
        return output.logits[:, -1]

    def new_cache(self) -> DynamicCache:
        """Return an empty cache; it keeps experts if this replica does."""
        return DynamicCache() if self._routers is None else RoutedCache()

    def _add_experts(self, cache: DynamicCache, input_ids: Tensor) -> None:
        if self._routers is not None and isinstance(cache, RoutedCache):
            cache.add_experts(self._routers.choices().unflatten(0, input_ids.shape))

    @torch.no_grad()
    def read_rows(self, prompts: Sequence[Sequence[int]]) -> CachedRows | None:
        """Read prompts of text; None if rows must be padded, without a prefix cache."""
        if not self._keeps_rows:
            return None
        return CachedRows(self.model, prompts, self.prefixes, is_invariant=self.is_invariant)

    @torch.no_grad()
    def read_prompts(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        images: Sequence[Sequence[bytes]],
        cache: DynamicCache,
    ) -> tuple[Tensor, Tensor]:
        """Logits after prompts with pictures, [batch, vocab], and the offset of later positions.

        Args:
            input_ids: int64 [batch, width], left-padded, a placeholder for each vision token.
            attention_mask: [batch, width], 0 on padding.
            images: encoded pictures of each prompt, in order.
            cache: empty; the prompts are added to it.

        Raises:
            UnsupportedSampling: a model of text.
        """
        if self.is_invariant:
            raise UnsupportedSampling(
                "a request has images, which attn_impl=batch_invariant does not support: use attn_impl=sdpa"
            )
        if self.processor is None:
            raise UnsupportedSampling("a request has images, and this model has no processor of images")
        pixels = self.processor.pixels([picture for row in images for picture in row])
        pixels = {name: tensor.to(self.device) for name, tensor in pixels.items()}
        types = ((input_ids == self.processor.image_token_id) & attention_mask.bool()).long()
        positions, offset = (attention_mask.cumsum(1) - 1).clamp(min=0), torch.zeros(len(input_ids)).long()
        family = vision_family(self.model)
        assert family is not None
        named = {family.types_option: types}
        if family.has_grids:  # positions of rows and columns
            positions, deltas = self.model.model.get_rope_index(
                input_ids,
                mm_token_type_ids=types,
                image_grid_thw=pixels["image_grid_thw"],
                attention_mask=attention_mask,
            )
            offset = deltas.flatten().long()
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=positions,
            **{cache_argument(type(self.model).forward): cache},
            use_cache=True,
            logits_to_keep=1,
            **named,
            **pixels,
        )
        self._add_experts(cache, input_ids)
        return output.logits[:, -1], offset.to(self.device)


def attends_to_all(model: PreTrainedModel) -> bool:
    config = model.config.get_text_config()
    windows = ("sliding_window", "attention_chunk_size", *DEPENDS_ON_FORWARD)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    has_window = any(getattr(config, name, None) for name in windows)
    return kinds == {"full_attention"} and not has_window and own_attention(model) == "sdpa"


def require_invariance(model: PreTrainedModel, keeps_rows: bool, device: torch.device) -> None:
    """Check what `is_invariant` needs.

    Raises:
        ModelError: the device is not a CPU, the model has a state or an attention that it does not
            support, or this machine's kernels depend on the number of rows.
    """
    family = model.config.get_text_config().model_type
    name = model.config.get_text_config()._attn_implementation
    if device.type != "cpu" or name != DECODING_INVARIANT or not keeps_rows:
        raise ModelError(
            f"attn_impl is 'batch_invariant', which needs a CPU and a model whose layers attend to all tokens; "
            f"this is a {family!r} model on {device.type}: use attn_impl=sdpa"
        )
    require_invariant_products(model)


def decoding_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention for generation: Transformers' own, except for a single new token on a CPU.

    Args:
        query: [batch, heads, new tokens, head_dim]. key, value: [batch, kv_heads, cached and new
            tokens, head_dim].
        attention_mask: bool [batch, 1, new tokens, cached and new tokens], true where a token may
            attend; None for everywhere.

    Returns:
        [batch, new tokens, heads, head_dim], and None in place of the attention weights.
    """
    if query.shape[2] > 1 or query.device.type != "cpu" or position_bias is not None:
        options |= {"scaling": scaling, "position_bias": position_bias}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if attention_mask is None:
        attention_mask = torch.ones(1, 1, 1, key.shape[2], dtype=torch.bool)
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    return attend_rows(query, key, value, attention_mask, scale), None


def invariant_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention as `INVARIANT` of the trainer does, a few queries at a time.

    Arguments and result are those of `decoding_attention`. Raises ModelError for what `attend_rows`
    does not support.
    """
    if position_bias is not None or softcap is not None or s_aux is not None:
        raise ModelError("attn_impl=batch_invariant does not support this model's attention: use sdpa")
    batch, heads, new, head_dim = query.shape
    if attention_mask is None:
        attention_mask = torch.ones(new, key.shape[2], dtype=torch.bool).tril(key.shape[2] - new)[None, None]
    scale = head_dim**-0.5 if scaling is None else scaling
    size = max(1, SCORES_AT_A_TIME // (batch * heads * key.shape[2]))
    pieces = zip(query.split(size, dim=2), attention_mask.split(size, dim=2), strict=True)
    return torch.cat([attend_rows(q, key, value, allowed, scale) for q, allowed in pieces], dim=1), None


for name, attention in {DECODING: decoding_attention, DECODING_INVARIANT: invariant_attention}.items():
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, sdpa_mask)


class PackedForward:
    """The forward of a linear layer, computed with a reordered copy of its weight."""

    def __init__(self, linear: nn.Linear) -> None:
        self.linear = linear
        self.packed: Tensor | None = None
        self._version = (0, 0)  # of the weight that was packed: its address, and its count of writes

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the output for rows bfloat16 [..., in_features], without gradients."""
        weight = self.linear.weight
        version = (weight.data_ptr(), weight._version)
        if self.packed is None or self._version != version:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)
            self._version = version
        return torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.linear.bias, "none", [], "")


def pack_linear_layers(model: nn.Module) -> None:
    if not computes_bfloat16():
        return
    for module in model.modules():
        if _is_packable(module):
            module.forward = PackedForward(cast(nn.Linear, module))


def computes_bfloat16() -> bool:
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _is_packable(module: nn.Module) -> bool:
    return (
        type(module) is nn.Linear
        and module.weight.dtype == torch.bfloat16
        and module.weight.device.type == "cpu"
    )
