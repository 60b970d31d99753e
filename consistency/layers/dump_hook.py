"""A hook inside an engine's process: it writes what a module computed, one file a call.

`MODULE.NUMBER.safetensors` has the tensors among the module's arguments (`in0`, `in1`, ...), among
its results (`out0`, ...), and for attention what SGLang's KV cache holds for the new tokens (`kv0`,
`kv1`). SGLang loads `dump` by `--forward-hooks`; this file, run as a script, registers it
in vLLM. It needs torch alone.
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


def dump(config: dict[str, Any]) -> Callable[..., None]:
    """Return a hook for module `config["name"]` that writes to `config["folder"]`.

    With `config["cache"]` the module is an attention layer of SGLang whose cache is read.
    """
    folder, name, num_calls = Path(config["folder"]), config["name"], 0

    def hook(module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        nonlocal num_calls
        logits = getattr(output, "next_token_logits", None)  # of SGLang's logits processor
        outputs = output if isinstance(output, tuple) else (output if logits is None else logits,)
        tensors = named("in", inputs) | named("out", outputs)
        if config.get("cache"):
            tensors |= named("kv", cached(module, inputs))
        save_file(tensors, folder / f"{name}.{num_calls:06}.safetensors")
        num_calls += 1

    return hook


def named(prefix: str, values: Sequence[Any]) -> dict[str, Tensor]:
    """Return copies of the tensors among `values`, named by place; kernels reuse the memory."""
    tensors = {f"{prefix}{place}": value for place, value in enumerate(values) if isinstance(value, Tensor)}
    return {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()}


def cached(module: Any, inputs: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Return keys and values [tokens, width] of the new tokens, read from SGLang's cache."""
    from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

    query, batch = inputs[0], inputs[3]
    keys, values = get_token_to_kv_pool().get_kv_buffer(module.layer_id)
    place = batch.out_cache_loc
    return tuple(buffer[place].flatten(1).to(query.dtype) for buffer in (keys, values))


def main() -> None:
    """Sample every prompt by itself."""
    from vllm import LLM, SamplingParams

    request: dict[str, Any] = json.load(sys.stdin)
    folder = Path(request["folder"])
    engine = LLM(
        model=request["model"],
        dtype=request["dtype"],
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=request["max_length"],
        skip_tokenizer_init=True,
    )
    sampling = SamplingParams(
        temperature=1.0, max_tokens=request["num_new"], ignore_eos=True, detokenize=False
    )
    model = engine.llm_engine.model_executor.driver_worker.worker.get_model()
    modules = dict(model.named_modules())
    rows = []
    for number, prompt in enumerate(request["prompts"]):
        target = folder / str(number)
        target.mkdir()
        handles = [
            modules[name].register_forward_hook(dump({"name": name, "folder": str(target)}))
            for name in request["modules"]
            if name in modules
        ]
        output = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0].outputs[0]
        rows.append([*prompt, *list(output.token_ids)[:-1]])
        for handle in handles:
            handle.remove()
    (folder / "rows.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
