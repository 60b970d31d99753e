"""`areal-debug consistency`: compare an engine's logprobs with the model's, token by token."""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.core import ParameterSource

from areal_debug.cli import Verb, force_option, json_option, output_option
from areal_debug.render import announce, count, fail, refuse_existing
from areal_debug.waiting import doing, tick

if TYPE_CHECKING:
    from consistency.case import Request
    from consistency.check import Checked
    from consistency.source import Sampling
    from recorder import Record

EXACT_NEW_TOKENS = 64  # by default
GONE = {
    "--gate": "compare the metrics of --json with the limits",
    "--trainer": "--exact compares with the trainer",
    "--against": "compare verdict and max_abs_difference of both certificates",
    "--update": "--conform checks the weight updates of a server",
}


def refuse_gone(context: click.Context, option: click.Parameter, value: object) -> None:
    """Say what replaces an option of version 0.3.0."""
    if value:
        fail(f"{option.opts[0]} is gone: {GONE[option.opts[0]]}")


@click.command(
    cls=Verb,
    example="areal-debug consistency runs/record\n"
    "areal-debug consistency runs/record --step 9 --replay-weights\n"
    "areal-debug consistency --engine HOST:PORT --model MODEL --prompts questions.jsonl -o report.html",
)
@click.argument("record", type=click.Path(path_type=Path), required=False)
@click.option(
    "--engine",
    "engines",
    multiple=True,
    metavar="URL",
    help="A live engine instead of a record: SGLang, vLLM or OpenAI-compatible. May be repeated.",
)
@click.option(
    "--model", help="Weights that should have sampled; by default those that the recorded run started from."
)
@click.option(
    "--step",
    "steps",
    type=int,
    multiple=True,
    metavar="N",
    help="Number of the step; by default the first, which the starting weights sampled. May be repeated.",
)
@click.option(
    "--over-time",
    is_flag=True,
    help="How the gap moves over the steps of RECORD: frozen, stale or drifting weights, a jump; needs no model.",
)
@click.option(
    "--replay-weights",
    is_flag=True,
    help="Where a step was sampled with newer weights than the first ones, replay the record up to it first.",
)
@click.option(
    "--prompts",
    "--dataset",
    "prompts",
    help="Prompts for a live engine: a JSONL or text file, or a Hugging Face dataset.",
)
@click.option("--split", help="Split of the dataset.")
@click.option(
    "--num-prompts", type=click.IntRange(1), default=64, show_default=True, help="Number of prompts."
)
@click.option(
    "--num-samples", type=click.IntRange(1), default=1, show_default=True, help="Completions per prompt."
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="Longest completion, in tokens.",
)
@click.option(
    "--top-p",
    type=float,
    default=1.0,
    show_default=True,
    help="Top-p of a live engine, or of another trainer's record.",
)
@click.option("--top-k", type=int, help="Top-k of a live engine, or of another trainer's record.")
@click.option("--previous", help="Checkpoint before --model, to recognise stale weights.")
@click.option(
    "--base",
    help="First or reference weights, or the model without its adapter, to recognise an engine that has these; "
    "by default the recorded run's first weights.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    help="Dtype of the scoring; by default the trainer's.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(0.0),
    help="Temperature of the trainer's logprobs and of a live engine's sampling; by default as recorded, or 1.",
)
@click.option("--device", default="cpu", show_default=True, help="Device of the scoring.")
@click.option(
    "--layers",
    metavar="ENGINE[=PATH]",
    help="Find the layer and operator that differ, in an engine started here: transformers, embedded, sglang or vllm.",
)
@click.option(
    "--vllm-python",
    default=sys.executable,
    metavar="FILE",
    help="Interpreter that has vLLM, for --layers vllm.",
)
@click.option(
    "--exact",
    is_flag=True,
    help="Sample from --engine (a URL, or `embedded`) and compare with the trainer bit for bit; -o writes a certificate.",
)
@click.option(
    "--tokens",
    "num_tokens",
    type=click.IntRange(1),
    default=20_000,
    show_default=True,
    help="With --exact: least number of sampled tokens to compare.",
)
@click.option(
    "--conform",
    is_flag=True,
    help="Send weights to --engine in every way that it offers, and check which ones it then has; sends --model back.",
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="With --exact: of prompts and sampling.",
)
@click.option("--trainer", is_flag=True, hidden=True, expose_value=False, callback=refuse_gone)
@click.option("--gate", hidden=True, expose_value=False, callback=refuse_gone)
@click.option("--against", hidden=True, expose_value=False, callback=refuse_gone)
@click.option("--update", hidden=True, expose_value=False, callback=refuse_gone)
@output_option("Also write the report as one HTML page; with --exact the certificate.")
@force_option
@json_option
def command(
    record: Path | None,
    engines: tuple[str, ...],
    model: str | None,
    steps: tuple[int, ...],
    output: Path | None,
    over_time: bool,
    force: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Score the sampled tokens of RECORD or of a live engine with a model, and check the engine's
    logprobs.

    With --exact: sample from an engine in batches of 1, 8 and 64, in another order, again, and from
    its prefix cache, and compare with a trainer of actor.attn_impl=batch_invariant on a CPU. With
    --conform: replace the engine's weights, and compare with a forward of those that were sent.

    Exit code 0: healthy, proven, or conforms. 1: a mismatch, refuted, or a failed check. 2:
    inconclusive, or a check could not run.
    """
    complete, asked = click.get_current_context().with_resource, model
    model, options["previous"], options["base"] = (
        path and complete(complete_checkpoint(path)) for path in (model, options["previous"], options["base"])
    )
    if asked is not None and model != asked and options["base"] is None:
        options["base"] = base_of(Path(asked))  # an engine may lack the adapter
    if over_time:
        if record is None or output is not None:
            fail(
                "--over-time reads the steps of RECORD and prints its report: leave out --engine and --output"
            )
        check_over_time(record, steps, as_json)
    if options["layers"]:
        from areal_debug.consistency.layers import check_layers

        if engines or output is not None:
            fail("--layers starts its engine and prints its report: leave out --engine and --output")
        model = model or (recorded_model(record) if record else None)
        check_layers(record, model, steps, as_json, options)
    if options["conform"]:
        from areal_debug.consistency.conform import check_conformance

        if len(engines) != 1 or model is None or record is not None or output is not None:
            fail("--conform needs --engine URL and --model FOLDER that it serves, and prints its report")
        check_conformance(engines[0], model, as_json)
    if options["exact"]:
        from areal_debug.consistency.exact import check_exact

        model = model or (recorded_model(record) if record else None)
        if len(engines) != 1 or model is None:
            fail("--exact needs --engine URL or `embedded`, and RECORD or --model FOLDER that it serves")
        if output is not None:
            refuse_existing(output, force)
        given = click.get_current_context().get_parameter_source("max_new_tokens")
        if given is not ParameterSource.COMMANDLINE:
            options["max_new_tokens"] = EXACT_NEW_TOKENS
        check_exact(engines[0], model, output, as_json, options)
    if (record is None) == (not engines):
        fail("give either RECORD, or --engine URL with --prompts, to compare with the model")
    refuse_existing(output, force)
    if record is not None:
        checked, request, source = check_recorded(record, steps, model, options)
    else:
        checked, request, source = check_live(engines, model, options)
    from areal_debug.consistency.report import report_of
    from areal_debug.report.terminal import answer
    from consistency.report import document

    report = report_of(checked, request, source)
    if output is not None:
        from areal_debug.report.frame import Frame
        from areal_debug.report.page import write_report

        run, verdict = str(source.get("record", "live engine")), checked.diagnosis.verdict
        write_report(output, report, Frame(report.sentence, run, "consistency", verdict))
    answer({"model": asked or request.model} | source | document(checked), report, as_json)


ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


def base_of(folder: Path) -> str | None:
    """Return the model that an adapter is for; None of another folder, or of one that needs pickle."""
    if (folder / "config.json").is_file() or not all((folder / name).is_file() for name in ADAPTER):
        return None
    return str(json.loads((folder / ADAPTER[0]).read_text())["base_model_name_or_path"])


@contextmanager
def complete_checkpoint(path: str) -> Iterator[str]:
    """Provide a checkpoint in a block: of a folder of an adapter, its base with the adapter merged in."""
    from areal_core.trainer.evaluation import merge_adapter
    from areal_debug.serve.start import checked_model

    base = base_of(Path(path))
    if base is None:
        checked_model(path)
        yield path
        return
    checked_model(base)
    with tempfile.TemporaryDirectory(prefix="merged-") as scratch:
        merge_adapter(path, base, Path(scratch))
        for file in (*Path(base).glob("*token*"), *Path(base).glob("chat_template*")):
            shutil.copy(file, scratch)
        yield scratch


def check_over_time(path: Path, steps: tuple[int, ...], as_json: bool) -> NoReturn:
    """Report how the gap moves over a record; ends the command."""
    from areal_debug.consistency.report import report_over_time
    from areal_debug.report.terminal import answer
    from consistency.over_time import document, examine
    from recorder import open_record

    found = examine(open_record(path), steps or None)
    answer({"record": str(path)} | document(found), report_over_time(found), as_json)


def recorded_model(record: Path) -> str | None:
    from recorder import open_record

    return open_record(record).header.model["path"] or None


def request_of(model: str, options: dict[str, Any]) -> "Request":
    """Return the options that concern the model's side."""
    from consistency.case import Request

    names = ("dtype", "device", "temperature", "previous", "base")
    return Request(model, **{name: options[name] for name in names})


def check_recorded(
    path: Path, steps: tuple[int, ...], model: str | None, options: dict[str, Any]
) -> tuple["Checked", "Request", dict[str, Any]]:
    from recorder import open_record

    record = open_record(path)
    if not record.steps:
        fail(f"{path} holds no committed step: nothing to check")
    steps = steps or record.steps[:1]
    source: dict[str, Any] = {"record": str(path), "steps": steps}
    from replayer.step_weights import read_folder, sampled_versions, shown_version, step_of_version

    first, needed = record.header.model["path"], sampled_versions(record, steps)
    version: int | None = None
    if model is None and options["replay_weights"] and needed - {0}:
        before = step_of_version(record, version := max(needed))
        folder = click.get_current_context().with_resource(replayed_model(record, before))
        model, source["model"] = folder, f"replayed to step {before}"
    elif not (model := model or first):
        fail(f"{record.path} does not name the model that sampled it: give --model PATH")
    else:
        version = shown_version(record, steps[0], needed, read_folder(model), "it was sampled with")
    announce(f"scoring {count(len(steps), 'step')} of {path} with {model}")
    from consistency.check import check  # imports torch
    from consistency.source import read_record

    if options["base"] is None and first and os.path.isdir(first) and not os.path.samefile(first, model):
        options["base"] = first  # an engine that an update did not reach still has these
    request = replace(request_of(model, options), is_shown=version is not None)
    sampling, notes = (None, ()) if record.header.config_is_ours else given_sampling(record, model, options)
    sampled = read_record(record, steps, sampling, version)
    sampled = replace(sampled, notes=(*notes, *sampled.notes))
    total = sum(len(chunk.input_ids) for chunk in sampled.chunks.values())
    with doing("scoring, in tokens", total):
        return check(sampled, request, tick), request, source


@contextmanager
def replayed_model(record: "Record", step: int) -> Iterator[str]:
    from areal_debug.consistency.replayed import replayed_weights

    announce(f"replaying {record.path} up to step {step} for its weights")
    with replayed_weights(record, [step]) as folders:
        [folder] = folders.values()
        yield str(folder)


def given_sampling(
    record: "Record", model: str, options: dict[str, Any]
) -> tuple["Sampling", tuple[str, ...]]:
    from consistency.source import ASSUMED, model_dtype, sampling_of

    source = click.get_current_context().get_parameter_source
    given = {name: options[name] for name in ASSUMED if source(name) is ParameterSource.COMMANDLINE}
    return sampling_of(record.header.config, given, options["dtype"] or model_dtype(model))


def check_live(
    engines: tuple[str, ...], model: str | None, options: dict[str, Any]
) -> tuple["Checked", "Request", dict[str, Any]]:
    if model is None or options["prompts"] is None:
        fail("--engine needs --model PATH (the weights it should serve) and --prompts FILE (the prompts)")
    announce(f"sampling from {count(len(engines), 'engine')}, and scoring with {model}")
    from transformers import AutoConfig, AutoTokenizer

    from areal_core.data.processor import load_processor
    from areal_core.rollout.types import TOP_K_OFF, Sampling
    from consistency.check import check
    from consistency.live import make_rescorer, query_engines, read_prompts, sampled_of, vocabulary_of
    from consistency.score import sees_images
    from consistency.source import model_dtype

    tokenizer = AutoTokenizer.from_pretrained(model)
    processor = load_processor(model) if sees_images(AutoConfig.from_pretrained(model)) else None
    vocabulary = vocabulary_of(tokenizer, processor)
    prompts = read_prompts(options["prompts"], options["split"], tokenizer, options["num_prompts"], processor)
    temperature = 1.0 if options["temperature"] is None else options["temperature"]
    law = Sampling(
        temperature=temperature,
        top_p=options["top_p"],
        top_k=TOP_K_OFF if options["top_k"] is None else options["top_k"],
        max_new_tokens=options["max_new_tokens"],
    )
    request = request_of(model, options)
    with doing("sampling, in samples", len(prompts) * options["num_samples"]):
        conversation = query_engines(engines, prompts, options["num_samples"], law, vocabulary, tick)
    sampled = sampled_of(conversation, options["dtype"] or model_dtype(model), vocabulary)
    with doing("scoring, in tokens", sum(len(chunk.input_ids) for chunk in sampled.chunks.values())):
        checked = check(sampled, request, tick, make_rescorer(conversation.addresses, vocabulary))
    source: dict[str, Any] = {"engines": [identity.describe() for identity in conversation.identities]}
    return checked, request, source
