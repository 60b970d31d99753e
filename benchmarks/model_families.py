"""Measure which causal language models of the installed Transformers train on their own log-probs.

For every model type: a tiny model with random weights, four rows of different lengths, and the
largest difference, in nats, between the engine's log-probs and entropies and those of plain
Transformers, which computes each row alone. Also the relative difference of the gradients of a
loss, and of the log-probs after export and reload; and the log-probs on two ranks, tensor or
sequence parallel.

    python -m benchmarks.model_families [TYPE ...] [--json FILE] [--write measurements/models.md]
    python -m benchmarks.model_families [TYPE ...] --trees

With --trees, for every family whose rows are packed: the differences between one tree of rows that
begin with the same tokens and packed rows, or why its rows do not share tokens: the table of
docs/algorithms.md.
"""

import copy
import json
import re
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, __version__
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from areal_core.engine.checkpoint.hf_folder import save_hf
from areal_core.engine.fsdp import FSDPEngine
from areal_core.engine.model import load_model, own_attention
from areal_core.engine.optimizer import build_optimizer, build_schedule
from areal_core.engine.parity import batch_of, columns_of, measure_parity, require_parity
from areal_core.engine.ranks import Ranks, join_ranks, leave_ranks
from areal_core.engine.sharding import full_tensor, shard_model
from areal_core.engine.trees.check import branching_rows, share_prefixes
from areal_core.testing import likelihood_with_entropy
from benchmarks.harness import ROOT, read_options, torchrun

LARGEST = 14_000_000  # parameters of a tiny model: above, a size below has another name there
LENGTHS = (11, 1, 6, 19)  # the longest last: dynamic RoPE in Transformers remembers longer rows
SPLITS = {"c2": {"sequence_parallel": 2}, "t2": {"tensor_parallel": 2}}

HEADER = """# Models

`benchmarks/model_families.py` measures every type of causal language model in Transformers
{version}: a tiny model with random weights and rows of different lengths, against plain
Transformers with one row at a time. Of {total} types and variants {equal} train on their own
log-probs: {packed} with packed rows, {alone} with one row at a time, which is chosen before the
first step and logged once. `areal-debug check model MODEL` runs the same check on a real model.

* float32, bfloat16: largest difference of a log-prob or entropy from plain Transformers in that
  dtype, in nats. `-` where Transformers itself fails in bfloat16.
* packed: the difference that packed rows have, or would have.
* gradient: largest relative difference of a gradient, float32. export: log-probs of the exported
  model.
* c2, t2: two ranks, sequence or tensor parallel, float32: the largest difference of log-probs or
  gradients. "refused": rows that are computed one at a time are not split over c, and tensor
  parallelism has no plan for the type. phimoe draws its experts at random while it trains, so its
  gradients on two ranks are those of other experts; its log-probs are equal.
"""

# Tiny sizes, and what makes a family or a variant of one special.
TINY = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
SIZES = {name: size for size, names in TINY["sizes"].items() for name in names.split()}
OPTIONS, VARIANTS = TINY["options"], TINY["variants"]
# Families whose rows are packed and do not share tokens.
NOT_SHARED = (
    "llama, dynamic RoPE",
    "phi3, LongRoPE",
    "codegen",
    "gptj",
    "gpt_neo",
    "gpt_neox_japanese",
    "phimoe",
)
NAMES = sorted([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS])


def tiny_config(name: str) -> PretrainedConfig:
    """Return a config with tiny sizes, of the language model if the type has further ones."""
    model_type, variant = VARIANTS.get(name, (name, {}))
    default = CONFIG_MAPPING[model_type]()
    text = default.get_text_config(decoder=True)
    options = text.to_dict()
    has = {
        name for name, value in options.items() if value is not None and not isinstance(value, list | dict)
    }
    changes = {name: value for name, value in SIZES.items() if name in has | ({"head_dim"} & options.keys())}
    if layer_types := options.get("layer_types"):
        kinds = list(dict.fromkeys(layer_types))
        changes["layer_types"] = (kinds * 4)[:4]
    changes |= {"pad_token_id": 0} | OPTIONS.get(text.model_type, {}) | variant
    return type(text)(**changes)


def write_tiny(name: str, folder: str) -> None:
    """Write a random float32 model in which every weight is random, norms and biases too,
    also those that are buffers."""
    config = tiny_config(name)
    with torch.device("meta"):
        size = AutoModelForCausalLM.from_config(copy.deepcopy(config)).num_parameters()
    if size > LARGEST:
        raise ValueError(f"no tiny config: {size:,} parameters")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        buffers = (tensor for name, tensor in model.named_buffers() if name.endswith("bias"))
        learned = [*model.parameters(), *filter(torch.is_floating_point, buffers)]
        for tensor in learned:
            tensor.add_(0.1 * torch.randn(tensor.shape))
    model.save_pretrained(folder)


def rows() -> list[Tensor]:
    """Return int64 tokens of each row."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 105, (length,), generator=generator) for length in LENGTHS]


def transformers_own(folder: str, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Compute (logprob, entropy) of each row alone, and the gradients of their sum / count."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    if model._can_set_attn_implementation():
        model.set_attn_implementation(own_attention(model))
    columns = []
    for row in rows():
        logits = model(input_ids=row[None], use_cache=False).logits[0, :-1].float()
        log_p = torch.log_softmax(logits, -1)
        at_label = log_p.gather(1, row[1:, None])[:, 0]
        columns.append(torch.stack([at_label, -(log_p.exp() * log_p).sum(-1)], 1))
    everything = torch.cat(columns)
    (-(everything[:, 0] + 0.1 * everything[:, 1]).sum() / len(everything)).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return [part.detach() for part in columns], gradients


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference of any value."""
    return float((torch.cat(found) - torch.cat(expected)).abs().nan_to_num(torch.inf).max())


def engine_of(folder: str, ranks: Ranks, dtype: torch.dtype) -> FSDPEngine:
    """Load and shard a model, with an optimizer that changes nothing."""
    model = shard_model(load_model(folder, disable_dropout=True), ranks, dtype=dtype)
    optimizer = build_optimizer(
        model.parameters(), kind="sgd", lr=0.0, weight_decay=0.0, beta1=0.0, beta2=0.0, eps=1e-8
    )
    schedule = build_schedule(
        optimizer, kind="constant", total_steps=1, warmup_proportion=0.0, min_lr_ratio=0.0
    )
    return FSDPEngine(model, ranks, dtype, optimizer=optimizer, schedule=schedule)


def gradients_of(engine: FSDPEngine, tokens: list[Tensor]) -> dict[str, Tensor]:
    """Return the full gradients of a loss of log-probs and entropies of rows."""
    found: dict[str, Tensor] = {}

    def keep(event: str, **_: object) -> None:
        if event == "gradients":
            parameters = engine.model.named_parameters()
            found.update({n: full_tensor(p.grad).clone() for n, p in parameters if p.grad is not None})

    engine.train_batch(batch_of(tokens), likelihood_with_entropy, lambda part: part["loss_mask"].sum(), keep)
    return found


def gradient_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest norm of a gradient's difference, relative to the norm of the gradient."""
    largest = max(float(gradient.norm()) for gradient in expected.values())
    return max(
        float((found[name] - gradient).norm()) / max(float(gradient.norm()), 1e-3 * largest)
        for name, gradient in expected.items()
    )


def measure(name: str, ranks: Ranks) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            write_tiny(name, folder)
            expected, gradients = transformers_own(folder, torch.float32)
        except Exception as error:  # of Transformers, whatever it is: there is nothing to compare
            return {"name": name, "unmeasured": first_line(error)}
        try:
            engine = engine_of(folder, ranks, torch.float32)
            parity = measure_parity(engine)
            if not parity.is_equal:
                return {"name": name, "refused": parity.reason}
            found: dict[str, Any] = {"name": name, "packs": parity.packs_rows, "reason": parity.reason}
            found["packed"] = parity.packed_difference
            found["float32"] = difference(columns_of(engine, rows()), expected)
            exported = f"{folder}/export"
            save_hf(exported, engine)
            found["export"] = difference(transformers_own(exported, torch.float32)[0], expected)
            found["gradient"] = gradient_difference(gradients_of(engine, rows()), gradients)
            found["bfloat16"] = measure_narrow(folder, ranks)
            return found
        except ValueError as error:
            return {"name": name, "refused": first_line(error)}


def measure_narrow(folder: str, ranks: Ranks) -> float | str:
    """Return the difference from plain Transformers in bfloat16, or why there is none."""
    engine = engine_of(folder, ranks, torch.bfloat16)
    try:
        if not measure_parity(engine).is_equal:
            return "refused"
    except ValueError as error:
        return first_line(error)
    try:
        expected, _ = transformers_own(folder, torch.bfloat16)
    except RuntimeError as error:
        return f"not measured, Transformers fails: {error}"
    return difference(columns_of(engine, rows()), expected)


def measure_split(names: list[str], split: str, shared: str) -> None:
    """On each of two ranks: print the differences of families in float32, on rank 0."""
    ranks = join_ranks("cpu", **SPLITS[split])
    found = {}
    for number, name in enumerate(names):
        folder = f"{shared}/{split}-{number}"
        if ranks.rank == 0:
            write_tiny(name, folder)
        ranks.barrier()
        try:
            expected, gradients = transformers_own(folder, torch.float32)
            engine = engine_of(folder, ranks, torch.float32)
            require_parity(engine, name)
            values = difference(columns_of(engine, rows()), expected)
            found[name] = max(values, gradient_difference(gradients_of(engine, rows()), gradients))
        except ValueError as error:
            found[name] = first_line(error)
        ranks.barrier()
    if ranks.rank == 0:
        print(json.dumps(found))
    leave_ranks()


def run_split(names: list[str], split: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as shared:
        done = torchrun("model_families", 2, *names, "--split", split, "--shared", shared)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found


def packed_families() -> list[str]:
    """Return the families of docs/measurements/models.md whose rows are packed."""
    return re.findall(
        r"^\| ([^|]*) \| packed \|", (ROOT / "docs/measurements/models.md").read_text(), re.MULTILINE
    )


@dataclass(frozen=True)
class OfTree:
    """How far a tree is from packed rows, or the reason why the rows of a family do not share tokens."""

    reason: str | None
    logprobs: float = 0.0
    gradients: float = 0.0


def measure_tree(name: str, ranks: Ranks) -> OfTree:
    with tempfile.TemporaryDirectory() as folder:
        write_tiny(name, folder)
        engine = engine_of(folder, ranks, torch.float32)
    measure_parity(engine)
    if reason := share_prefixes(engine, name):
        return OfTree(reason)
    tokens = branching_rows(rows())
    tree = columns_of(engine, tokens), gradients_of(engine, tokens)
    engine.shares_prefixes = False
    columns, gradients = columns_of(engine, tokens), gradients_of(engine, tokens)
    return OfTree(None, difference(tree[0], columns), gradient_difference(tree[1], gradients))


def print_trees(names: list[str], ranks: Ranks) -> None:
    print("| type | log-probs | gradients | not shared, because |\n|---|---|---|---|")
    for name in names:
        found = measure_tree(name, ranks)
        numbers = "- | -" if found.reason else f"{found.logprobs:.1e} | {found.gradients:.1e}"
        print(f"| {name} | {numbers} | {found.reason or ''} |", flush=True)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, with its type."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def table(measured: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the matrix."""
    yield "| type | rows | packed | float32 | bfloat16 | gradient | export | c2 | t2 |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in measured:
        if "float32" not in row:
            continue
        how = "packed" if row["packs"] else "one at a time"
        numbers = [row[key] for key in ("packed", "float32", "bfloat16", "gradient", "export", "c2", "t2")]
        yield f"| {row['name']} | {how} | {' | '.join(map(cell, numbers))} |"


def cell(value: float | str | None) -> str:
    """Return a number in two digits; refusals of a split are listed apart."""
    if value is None or (isinstance(value, str) and value.startswith("not measured")):
        return "-"
    return "refused" if isinstance(value, str) else f"{value:.1e}"


def bullet(row: dict[str, Any], key: str) -> str:
    """Return a wrapped line of a list: the name of a row, and one of its values."""
    return textwrap.fill(
        f"* {row['name']}: {row[key]}",
        100,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def page(measured: list[dict[str, Any]]) -> str:
    """Return docs/measurements/models.md."""
    equal = [row for row in measured if "float32" in row]
    alone = [row for row in equal if not row["packs"]]
    lines = [
        HEADER.format(
            version=__version__,
            total=len(measured),
            equal=len(equal),
            packed=len(equal) - len(alone),
            alone=len(alone),
        ),
        *table(measured),
        "",
        "## Why rows are computed one at a time",
        "",
        *(bullet(row, "reason") for row in alone),
        "",
        "## Refused",
        "",
        *(bullet(row, "refused") for row in measured if "refused" in row),
        "",
        "## Not measured",
        "",
        "Transformers cannot build or run a tiny model of these with the options that the script has.",
        "",
        *(bullet(row, "unmeasured") for row in measured if "unmeasured" in row),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    options = read_options(__doc__, {"names": list}, json="", write="", split="", shared="", trees=False)
    warnings.filterwarnings("ignore")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    if options.split:
        measure_split(options.names, options.split, options.shared)
        return
    ranks = join_ranks("cpu")
    if options.trees:
        print_trees(options.names or packed_families(), ranks)
        leave_ranks()
        return
    measured = []
    for name in options.names or NAMES:
        measured.append(measure(name, ranks))
        print(json.dumps(measured[-1]), file=sys.stderr, flush=True)
    leave_ranks()
    names = [row["name"] for row in measured if "float32" in row]
    for split in SPLITS:
        for name, value in run_split(names, split).items():
            next(row for row in measured if row["name"] == name)[split] = value
    if options.json:
        Path(options.json).write_text(json.dumps(measured, indent=1))
    if options.write:
        Path(options.write).write_text(page(measured))
    print("\n".join(table(measured)))


if __name__ == "__main__":
    main()
