"""`areal-debug consistency --layers ENGINE`: the first layer and operator that differ."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from areal_debug.render import fail
from areal_debug.report.model import Block, Facts, Report, Row, Table, tone_of
from areal_debug.report.terminal import answer

if TYPE_CHECKING:
    from consistency.layers.judge import LayersReport, SiteReport
    from consistency.layers.observed import Observed
    from consistency.layers.observed import Row as TokenRow

NUM_ROWS, ROW_TOKENS, NEW_TOKENS = 8, 256, 32
ENGINES = ("transformers", "embedded", "sglang", "vllm")

WEIGHTS = "compare this layer's weights and biases on both sides: after an update, one tensor may be stale"
NORM = "compare rms_norm_eps, the norm's weight, and whether the class multiplies by w or by 1 + w"
# What to look at, by the last word of the operator.
NEXT_STEPS = {
    "rope": "compare rope_parameters of both configs: base, type, factor, and the position of the first token",
    "norm": NORM,
    "attention": "compare the scale, the soft cap, sliding_window and layer_types of both configs",
    "cache": "compare the cache's dtype and scales, as kv_cache_dtype",
    "experts": "compare num_experts_per_tok and norm_topk_prob, and this layer's experts",
    "activation": "compare hidden_act (hidden_activation) of both configs",
    "logits": "compare final_logit_softcapping of both configs",
    "processor": "compare preprocessor_config.json on both sides; without --layers the option is named",
    "tower": "compare the tower's checksums on both sides: is it in the weight update, or frozen?",
}


def check_layers(
    record: Path | None, model: str | None, steps: Sequence[int], as_json: bool, options: dict[str, Any]
) -> NoReturn:
    """Compare an engine with the model by operator; print the report, end the command."""
    kind, _, path = options["layers"].partition("=")
    if kind not in ENGINES:
        fail(
            f"--layers {options['layers']!r} names no engine: give one of {', '.join(ENGINES)}, or ENGINE=PATH"
        )
    if options["device"] != "cpu":
        fail(f"--layers computes on the CPU: leave out --device {options['device']}")
    if record is None and options["prompts"] is None:
        fail("--layers needs tokens: give RECORD, or --prompts FILE with --model PATH")
    if model is None:
        fail("--layers needs --model PATH, the weights that the engine should have")
    report = compare(kind, path or model, model, record, options | {"steps": steps})
    answer(document(report), report_of(report), as_json)


def compare(kind: str, path: str, model: str, record: Path | None, options: dict[str, Any]) -> "LayersReport":
    """Run engine and reference on the same rows."""
    import torch

    from areal_core.engine.model import load_model
    from consistency.layers.judge import compare_layers, reference_of
    from consistency.source import model_dtype

    dtype = getattr(torch, options["dtype"] or model_dtype(model))
    rows = recorded_rows(record, model, options["steps"]) if record else read_prompt_rows(model, options)
    values, rows = run_engine(kind, path, dtype, rows, 1 if record else NEW_TOKENS, options)
    reference = reference_of(load_model(model, dtype=dtype, attn_implementation="sdpa"))
    return compare_layers(reference, values, rows)


def run_engine(
    kind: str, path: str, dtype: Any, rows: "list[TokenRow]", num_new: int, options: dict[str, Any]
) -> "tuple[Observed, list[TokenRow]]":
    """Return what the engine computed, and for which rows: servers add tokens of their own."""
    from consistency.layers import observed, servers

    num_new = min(num_new, options["max_new_tokens"])
    if kind == "sglang":
        return servers.sglang(path, dtype, rows, num_new)
    if kind == "vllm":
        return servers.vllm(path, dtype, rows, num_new, options["vllm_python"])
    engine = observed.embedded if kind == "embedded" else observed.transformers
    return engine(path, dtype, rows), rows


def recorded_rows(path: Path, model: str, steps: Sequence[int]) -> "list[TokenRow]":
    """Return the first rows of a record's step, up to a sampled placeholder of an image."""
    from areal_core.data.processor import load_processor
    from consistency.alternatives.images import from_placeholder
    from consistency.source import read_step
    from recorder import open_record

    record = open_record(path)
    if not record.steps:
        fail(f"{path} holds no committed step: nothing to check")
    found = read_step(record.step(steps[0] if steps else record.steps[0]), record.header.trainer is not None)
    token_id = load_processor(model).image_token_id if found.images else -1
    is_read = ~from_placeholder(found, token_id)
    images = found.images or ((),) * found.num_rows
    places = [found.row(row) for row in range(min(NUM_ROWS, found.num_rows))]
    return [
        short_row(found.input_ids[at][is_read[at]].tolist(), seen, token_id)
        for at, seen in zip(places, images, strict=False)
    ]


def read_prompt_rows(model: str, options: dict[str, Any]) -> "list[TokenRow]":
    from transformers import AutoConfig, AutoTokenizer

    from areal_core.data.processor import load_processor
    from consistency.live import read_prompts
    from consistency.score import sees_images

    tokenizer = AutoTokenizer.from_pretrained(model)
    processor = load_processor(model) if sees_images(AutoConfig.from_pretrained(model)) else None
    token_id = -1 if processor is None else processor.image_token_id
    number = min(NUM_ROWS, options["num_prompts"])
    prompts = read_prompts(options["prompts"], options["split"], tokenizer, number, processor)
    return [short_row(list(prompt.ids), prompt.images, token_id) for prompt in prompts]


def short_row(ids: list[int], images: tuple[bytes, ...], token_id: int) -> "TokenRow":
    from consistency.layers.observed import Row as TokenRow

    row = TokenRow(ids, images, token_id)
    return replace(row, ids=ids[: row.end_of_images + ROW_TOKENS])


def document(report: "LayersReport") -> dict[str, Any]:
    """Return the report as JSON values; `layer` is null before and after the layers."""
    return {
        "verdict": report.verdict,
        "engine": report.engine,
        "dtype": report.dtype,
        "num_rows": report.num_rows,
        "num_tokens": report.num_tokens,
        "first": site_values(report.first) if report.first else None,
        "sites": [site_values(site) for site in report.sites],
        "not_shown_by_the_engine": report.only_reference,
    }


def site_values(report: "SiteReport") -> dict[str, Any]:
    values = asdict(report)
    return {
        "layer": report.site.layer,
        "result": report.site.result,
        "is_created": report.is_created,
        "is_inherited": report.is_inherited,
    } | {name: value for name, value in values.items() if name != "site"}


def place(report: "SiteReport") -> str:
    """Return layer and operator, as "layer 3, rope"."""
    return report.operator if report.site.layer is None else f"layer {report.site.layer}, {report.operator}"


def report_of(report: "LayersReport") -> Report:
    """Return the first operator that differs, what supports it, and a row for each layer."""
    sentence = {
        "inconclusive": f"no operator of {report.engine} was seen",
        "healthy": f"every operator of {report.engine} computes what the model's does",
    }.get(report.verdict) or f"{place(report.first)} in {report.engine}"  # type: ignore[arg-type]
    measured = f"{report.dtype}, {report.num_rows} rows, {report.num_tokens} tokens"
    blocks: list[Block] = [] if report.first is None else [Facts(rows_about(report, report.first))]
    if report.only_reference:
        blocks.append(Facts([Row("not shown", f"by the engine: {', '.join(report.only_reference)}")]))
    blocks += [layers_table(report)] if report.sites else []
    return Report(report.verdict.capitalize(), f"{sentence} ({measured})", tone_of(report.verdict), blocks)


def rows_about(report: "LayersReport", first: "SiteReport") -> list[Row]:
    """Return why the difference begins here, where else one does, and what to do."""
    created = (
        "fed with the engine's own input, the model's operator gives another result in "
        f"{first.num_beyond} of {first.num_tokens} tokens: {first.created:.2g} of its size; rounding gives "
        f"{first.floor:.2g}, {first.ratio:.3g} times less"
    )
    rows = [Row("created there", created)]
    before = [site for site in report.sites if site.site < first.site and site.is_inherited]
    if before:
        rows.append(Row("input", f"differs more than rounding does already, since {place(before[0])}"))
    others = dict.fromkeys(place(s) for s in report.sites if s.is_created and place(s) != place(first))
    if others:
        rest = f" and {len(others) - 6} more" if len(others) > 6 else ""
        rows.append(Row("created also in", "; ".join([*others][:6]) + rest))
    refuted = "the engine's class computes this operator otherwise on purpose, as a quantised cache does"
    return [*rows, Row("next", next_step(first)), Row("refuted if", refuted)]


def next_step(first: "SiteReport") -> str:
    """Return what to look at for an operator; of several that it may be, the last one."""
    name = first.operator.rpartition(" or ")[2]
    if name.startswith("adapter"):
        return "compare lora_alpha and r of both sides, and which version of the adapter the engine has"
    if name.startswith("norm"):
        return NORM
    return NEXT_STEPS.get(name.rpartition(" ")[2], WEIGHTS)


def layers_table(report: "LayersReport") -> Table:
    """Return a row for each layer: the operator with the largest gap, in noise floors."""
    rows = []
    for _, group in groupby(report.sites, key=lambda site: site.site.place[0]):
        worst = max(group, key=lambda site: site.ratio)
        word = "created" if worst.is_created else "inherited" if worst.is_inherited else ""
        numbers = (f"{worst.created:.2g}", f"{worst.floor:.2g}", f"{worst.ratio:.3g}", f"{worst.total:.2g}")
        layer = "" if worst.site.layer is None else str(worst.site.layer)
        rows.append((layer, worst.operator, *numbers, word))
    headings = ("layer", "operator", "created>", "floor>", "ratio>", "total gap>", "")
    return Table(headings, rows, "Largest gap of each layer, in noise floors")
