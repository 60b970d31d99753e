"""`areal-debug consistency`: the engine's logprobs against the model's, token by token, and why they differ."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from areal_debug.render import console, errors_as_sentences, fail, print_json

if TYPE_CHECKING:
    from consistency.check import Checked
    from consistency.request import Request
    from consistency.source import Sampling

GSM8K_REWARD = "areal_core.reward.functions.gsm8k_reward_fn"


@click.command()
@click.argument("record", type=click.Path(path_type=Path), required=False)
@click.option(
    "--engine",
    "engines",
    multiple=True,
    metavar="URL",
    help="A live engine instead of a record: SGLang, vLLM or OpenAI-compatible. May be repeated.",
)
@click.option(
    "--model",
    help="The weights that should have sampled; those that the recorded run started from unless given.",
)
@click.option(
    "--step",
    "steps",
    type=int,
    multiple=True,
    help="A step to check; the first one unless given. May be repeated.",
)
@click.option(
    "--prompts",
    "--dataset",
    "prompts",
    help="What to ask a live engine: a JSONL or text file, or a Hugging Face dataset.",
)
@click.option("--split", help="Of a dataset.")
@click.option("--num-prompts", type=click.IntRange(1), default=64, show_default=True)
@click.option(
    "--num-samples", type=click.IntRange(1), default=1, show_default=True, help="Completions of each prompt."
)
@click.option("--max-new-tokens", type=click.IntRange(1), default=128, show_default=True)
@click.option(
    "--top-p", type=float, default=1.0, show_default=True, help="Of a live engine, or an imported record."
)
@click.option("--top-k", type=int, help="Of a live engine, or an imported record.")
@click.option(
    "--answers", is_flag=True, help="Compare greedy answers too; rows need an answer (see --reward)."
)
@click.option(
    "--reward", default=GSM8K_REWARD, show_default=True, help="Judges answers: package.module.function."
)
@click.option(
    "--trainer", is_flag=True, help="Ask the trainer's packed path too, where the record does not hold it."
)
@click.option("--previous", help="The checkpoint before that, to recognise stale weights.")
@click.option("--base", help="The model without its adapter, to recognise an adapter that was not loaded.")
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16"]), help="Of the scoring; the trainer's unless given."
)
@click.option(
    "--temperature",
    type=click.FloatRange(0.0),
    help="Of the trainer's logprobs, and of a live engine's sampling; the recorded one, or 1, unless given.",
)
@click.option("--device", default="cpu", show_default=True, help="Where to score.")
@click.option(
    "--scores",
    "scores_folder",
    type=click.Path(path_type=Path),
    help="Keep finished scores here, and go on from them.",
)
@click.option(
    "--gate",
    default="",
    metavar="METRIC=LIMIT,...",
    help="Exit 1 when a metric is beyond its limit: mean_abs=0.02,k3=0.002.",
)
@click.option(
    "--html",
    "page",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the report as one page, too.",
)
@click.option("--json", "as_json", is_flag=True, help="The same facts as JSON.")
@errors_as_sentences
def command(
    record: Path | None,
    engines: tuple[str, ...],
    model: str | None,
    steps: tuple[int, ...],
    gate: str,
    page: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Score sampled tokens, of RECORD or of a live engine, with a model, and judge the engine's logprobs.

    Exit 0 is healthy, 1 a mismatch or a gate that does not hold, 2 cannot tell.
    """
    if (record is None) == (not engines):
        fail("give either RECORD, or --engine URL with --prompts: what is to be compared with the model?")
    from areal_debug.consistency_output import print_report
    from consistency.report import check_gates, document, exit_code

    if record is not None:
        checked, request, told = check_recorded(record, steps, model, options)
    else:
        checked, request, told = check_live(engines, model, options)
    gates = check_gates(gate, checked.diagnosis.measurement.metrics)
    if page is not None:
        from areal_debug.consistency_page import write_page

        write_page(page, checked, gates, request, told)
    if as_json:
        print_json(told | {"model": request.model} | document(checked, gates))
    else:
        print_report(console(), checked, gates, request, told)
    raise SystemExit(exit_code(checked, gates))


def request_of(model: str, options: dict[str, Any]) -> "Request":
    """The options that speak of the model's side."""
    from consistency.request import Request

    names = ("dtype", "device", "temperature", "previous", "base", "scores_folder", "trainer")
    return Request(model, **{name: options[name] for name in names})


def check_recorded(
    path: Path, steps: tuple[int, ...], model: str | None, options: dict[str, Any]
) -> tuple["Checked", "Request", dict[str, Any]]:
    """The check of some steps of a record, and what to tell of them."""
    from consistency.check import check
    from consistency.source import read_record
    from recorder import open_record

    record = open_record(path)
    if not record.steps:
        fail(f"{path} holds no committed step: nothing to check")
    steps = steps or record.steps[:1]
    model = model or record.header.model["path"]
    if not model:
        fail(f"{path} does not say which model sampled it: give --model PATH")
    request = request_of(model, options)
    sampled = read_record(record, steps, None if record.header.config else assumed_sampling(model, options))
    total = sum(len(chunk.input_ids) for chunk in sampled.chunks.values())
    with progress_bar("scoring", total) as advance:
        return check(sampled, request, advance), request, {"record": str(path), "steps": steps}


def assumed_sampling(model: str, options: dict[str, Any]) -> "Sampling":
    """How an imported record was sampled, as far as options and checkpoint tell: engines serve bfloat16 unless told otherwise."""
    from consistency.source import Sampling, model_dtype

    temperature = 1.0 if options["temperature"] is None else options["temperature"]
    dtype = options["dtype"] or model_dtype(model)
    greedy = temperature == 0.0
    return Sampling(temperature, options["top_p"], options["top_k"], greedy, dtype, engine_dtype="bfloat16")


def check_live(
    engines: tuple[str, ...], model: str | None, options: dict[str, Any]
) -> tuple["Checked", "Request", dict[str, Any]]:
    """The check of what engines sample now, and what to tell of them."""
    if model is None or options["prompts"] is None:
        fail("--engine needs --model PATH (the weights it should serve) and --prompts FILE (what to ask it)")
    from transformers import AutoTokenizer

    from areal_core.reward import load_reward_fn
    from consistency.answers import compare_answers, load_generating
    from consistency.engine.reply import SamplingParams
    from consistency.live import check_engines, query_engines, sampled_of, vocabulary_of
    from consistency.prompts import read_prompts
    from consistency.source import model_dtype

    tokenizer = AutoTokenizer.from_pretrained(model)
    vocabulary = vocabulary_of(tokenizer)
    prompts = read_prompts(options["prompts"], options["split"], tokenizer, options["num_prompts"])
    temperature = 1.0 if options["temperature"] is None else options["temperature"]
    law = SamplingParams(temperature, options["top_p"], options["top_k"], options["max_new_tokens"])
    request = request_of(model, options)
    with progress_bar("asking", len(prompts) * options["num_samples"]) as advance:
        conversation = query_engines(engines, prompts, options["num_samples"], law, vocabulary, advance)
    sampled = sampled_of(conversation, options["dtype"] or model_dtype(model))
    with progress_bar("scoring", sum(len(chunk.input_ids) for chunk in sampled.chunks.values())) as advance:
        checked = check_engines(conversation, sampled, request, vocabulary, advance)
    told: dict[str, Any] = {"engines": [identity.describe() for identity in conversation.identities]}
    if options["answers"]:
        told["answers"] = asdict(
            compare_answers(
                engines,
                prompts,
                replace(law, temperature=0.0, top_p=1.0, top_k=None),
                vocabulary,
                load_generating(model, checked.dtype, request.device),
                load_reward_fn(options["reward"]),
            )
        )
    return checked, request, told


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error, moved by what it yields, that tells how many a second."""
    import sys

    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (TextColumn(what), BarColumn(), TaskProgressColumn(show_speed=True))
    quiet = not sys.stderr.isatty()
    with Progress(*columns, console=console(stderr=True), transient=True, disable=quiet) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)
