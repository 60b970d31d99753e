"""SGLang and vLLM as engines: each in a process of its own, with `dump_hook` on its modules.

Prompts are sampled one at a time. A row, prompt and completion, has passed through prefill and
decode; its last token was never an input, and is left out.
"""

import json
import os
import subprocess
import tempfile
import uuid
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

import consistency
from areal_core.config import SGLangConfig
from areal_core.engine.model import is_vision
from areal_core.launch.server_process import path_with
from areal_core.launch.sglang_process import SGLangServer, cpu_environment, server_args
from areal_core.rollout.types import Sampling
from areal_core.servers.server import call
from areal_core.servers.sglang import SGLANG
from consistency.engines import Pictures, with_pictures
from consistency.errors import EngineError
from consistency.layers.hooks import OPERATORS, Site, dense_routing
from consistency.layers.observed import Observed, Row, Rows, RowValues

FINAL_NORM, LOGITS, FIRST = "model.norm", "logits_processor", "model.layers.0.input_layernorm"
Call = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """What the names of fused tensors need: sizes of a model."""

    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary_size: int
    num_experts: int
    max_length: int
    has_softcap: bool
    has_window: bool
    has_images: bool

    @classmethod
    def of(cls, path: str | Path) -> Self:
        """Read the sizes from a model's config."""
        whole = AutoConfig.from_pretrained(path)
        config: Any = whole.get_text_config()
        heads = config.num_attention_heads
        return cls(
            config.num_hidden_layers,
            heads,
            getattr(config, "num_key_value_heads", heads),
            getattr(config, "head_dim", None) or config.hidden_size // heads,
            config.vocab_size,
            getattr(config, "num_experts", 0),
            config.max_position_embeddings,
            getattr(config, "final_logit_softcapping", None) is not None,
            getattr(config, "sliding_window", None) is not None,
            is_vision(whole),
        )

    def modules(self) -> list[str]:
        """Return the names of the modules to hook; a model lacks some of them."""
        layers = [
            f"model.layers.{layer}.{leaf}"
            for layer in range(self.num_layers)
            for leaf in OPERATORS["servers"]["modules"]
        ]
        return [*layers, FINAL_NORM, LOGITS]


def read_row(folder: Path, row: list[int], shape: Shape) -> RowValues:
    calls: dict[str, list[Call]] = defaultdict(list)
    for file in sorted(folder.glob("*.safetensors")):
        calls[file.name.rsplit(".", 2)[0]].append(load_file(file))
    values, start = RowValues(len(row)), 0
    has_two_norms = "model.layers.0.pre_feedforward_layernorm" in calls
    for number, first in enumerate(calls[FIRST]):
        end = start + len(first["in0"])
        values.put(Site("images" if shape.has_images else "embedding"), start, first["in0"])
        for name, of_module in calls.items():
            for site, value in sites_of(name, of_module[number], shape, has_two_norms):
                num_rows = len(value) if site.result in ("head", "logits") else end - start
                values.put(site, end - num_rows, value.reshape(num_rows, -1))
        start = end
    return values


def sites_of(name: str, call: Call, shape: Shape, has_two_norms: bool) -> Iterator[tuple[Site, Tensor]]:
    if name == LOGITS:
        logits = call["out0"][:, : shape.vocabulary_size]
        yield Site("logits" if shape.has_softcap else "head"), logits
        return
    if name == FINAL_NORM:
        yield Site("final_norm"), call["out0"]
        if "out1" in call:
            yield Site("residual", shape.num_layers - 1), call["out1"]
        return
    _, _, number, leaf = name.split(".", 3)
    layer = int(number)
    if leaf == "post_attention_layernorm" and not has_two_norms:
        leaf = "pre_feedforward_layernorm"
    results: dict[str, str] = OPERATORS["servers"]["results"].get(leaf, {})
    for key in results.keys() & call.keys():
        yield Site(results[key], layer), call[key]
    if leaf == "input_layernorm" and "out1" in call and layer:
        yield Site("residual", layer - 1), call["out1"]
    elif leaf == "self_attn.qkv_proj":
        sizes = [heads * shape.head_dim for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
        for result, value in zip("qkv", call["out0"].split(sizes, dim=-1), strict=True):
            yield Site(result, layer), value
    elif leaf == "mlp.gate_up_proj":
        for result, value in zip(("gate", "up"), call["out0"].chunk(2, dim=-1), strict=True):
            yield Site(result, layer), value
    elif leaf == "mlp.topk" and {"out0", "out1"} <= call.keys():
        yield Site("routing", layer), dense_routing(call["out1"], call["out0"], shape.num_experts)


ROOT = Path(consistency.__file__).parents[1]
READY_TIMEOUT_S = 600.0
REPLY_TIMEOUT_S = 600.0
ENGINE_TOKENS = 4096
NEVER = -1e4  # bias of a logit


def sglang(path: str | Path, dtype: torch.dtype, prompts: Rows, num_new: int) -> tuple[Observed, list[Row]]:
    """Sample from an SGLang server on this machine's CPU; return its values, and the rows.

    Raises:
        EngineError: the server computed nothing that was hooked.
    """
    shape = Shape.of(path)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "dumps")
        folder.mkdir()
        flags = [*on_cpu(dtype, shape), "--forward-hooks", json.dumps(hook_specs(shape, folder))]
        environment = cpu_environment()
        environment["PYTHONPATH"] += os.pathsep + str(ROOT)
        log = Path(scratch, "server.log")
        server = SGLangServer(path, log, flags, environment, ready_timeout_s=READY_TIMEOUT_S)
        found: list[RowValues] = []
        rows: list[Row] = []
        with server as running:
            for prompt in prompts:
                empty(folder)  # of the server's own warm-up, or the previous row
                reply = call(
                    running.server, "POST", "/generate", request_of(prompt, num_new), REPLY_TIMEOUT_S
                )
                sampled = SGLANG.parse_generate(reply.encode()).tokens[:-1]
                rows.append(replace(prompt, ids=[*prompt.ids, *sampled]))
                found.append(checked_row(folder, rows[-1].ids, shape, "SGLang"))
    return Observed(f"SGLang with {path}", dtype, found), rows


def request_of(prompt: Row, num_new: int) -> dict[str, Any]:
    """Return the JSON of a request of `num_new` tokens, none of them a placeholder of images."""
    bias = {"logit_bias": {str(prompt.image_token_id): NEVER}} if prompt.images else {}
    sampling = Sampling(ignore_eos=True, server_only=bias)
    payload = SGLANG.generate_payload(prompt.ids, sampling, num_new, 0, uuid.uuid4().hex)
    pictures = Pictures(prompt.images, prompt.image_token_id) if prompt.images else None
    return with_pictures(payload, prompt.ids, pictures)


def on_cpu(dtype: torch.dtype, shape: Shape) -> list[str]:
    """Return the flags of a server whose every pass computes all tokens of one request."""
    options = SGLangConfig(
        dtype=str(dtype).removeprefix("torch."),
        max_total_tokens=ENGINE_TOKENS,
        context_length=min(ENGINE_TOKENS, shape.max_length),
    )
    return [*server_args(options, "cpu"), "--disable-radix-cache"]


def hook_specs(shape: Shape, folder: Path) -> list[dict[str, object]]:
    """Return SGLang's specification of hooks: one a module, as a hook does not get its name."""
    return [
        {
            "name": name,
            "target_modules": [name],
            "hook_factory": "consistency.layers.dump_hook:dump",
            # A model with windows has two pools of memory, and places in them differ.
            "config": {
                "name": name,
                "folder": str(folder),
                "cache": name.endswith(".attn") and not shape.has_window,
            },
        }
        for name in shape.modules()
    ]


def vllm(
    path: str | Path, dtype: torch.dtype, prompts: Rows, num_new: int, python: str
) -> tuple[Observed, list[Row]]:
    """Sample from vLLM in a child process of the interpreter `python`; return values and rows.

    Raises:
        EngineError: the child failed, and the message has the end of its output; or prompts have
            images.
    """
    if any(prompt.images for prompt in prompts):
        raise EngineError(
            "--layers vllm takes no images: give prompts of text, or transformers, embedded or sglang"
        )
    shape = Shape.of(path)
    with tempfile.TemporaryDirectory() as scratch:
        request = {
            "model": str(path),
            "dtype": str(dtype).removeprefix("torch."),
            "prompts": [prompt.ids for prompt in prompts],
            "num_new": num_new,
            "max_length": min(ENGINE_TOKENS, shape.max_length),
            "modules": shape.modules(),
            "folder": scratch,
        }
        script = Path(__file__).parent / "dump_hook.py"
        environment = os.environ | {
            "PYTHONPATH": path_with(ROOT),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        done = subprocess.run(
            [python, str(script)], input=json.dumps(request), env=environment, capture_output=True, text=True
        )
        result = Path(scratch, "rows.json")
        if done.returncode or not result.is_file():
            raise EngineError(f"vLLM ({python}) ended with code {done.returncode}: {done.stderr[-600:]}")
        rows = [Row(ids) for ids in json.loads(result.read_text())]
        found = [
            checked_row(Path(scratch, str(number)), row.ids, shape, "vLLM") for number, row in enumerate(rows)
        ]
    return Observed(f"vLLM with {path}", dtype, found), rows


def checked_row(folder: Path, row: list[int], shape: Shape, engine: str) -> RowValues:
    values = read_row(folder, row, shape)
    if not values.values:
        raise EngineError(
            f"{engine} computed none of the hooked modules: its class for this model has other names"
        )
    return values


def empty(folder: Path) -> None:
    """Remove the files of a folder."""
    for file in folder.iterdir():
        file.unlink()
