"""Read a record into columns: sampled tokens, the engine's logprobs, and the sampling options."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import AutoConfig

from areal_core.data.routed_experts import ROUTED_EXPERTS
from areal_core.errors import load_failure
from areal_core.rollout.types import TOP_K_OFF
from consistency.case import Setting
from consistency.causes import Finding
from consistency.engines import Top
from consistency.errors import NothingToCompare
from consistency.measure import NOISE, Noise
from consistency.tokens import Floats, Images, Sequences
from recorder import Record, RecordedStep

COMPARED = ("input_ids", "loss_mask", "logprobs")  # a row without one of them is left out
COLUMNS = ("cu_seqlens", "input_ids", "loss_mask", "logprobs", "versions", "prompt_id")


@dataclass(frozen=True)
class Sampling:
    """Sampling options and dtypes of a run, from its resolved config."""

    temperature: float
    top_p: float
    top_k: int | None
    greedy: bool
    trainer_dtype: str
    engine_dtype: str
    kv_cache_dtype: str | None = None


@dataclass(frozen=True)
class Sampled:
    """Sampled tokens to check, as scoring chunks by name (`step-000004`).

    `version` is that of the weights, None if there are several. One entry per scored token: `tops`
    holds the engine's most likely tokens, `trainer` the trainer's logprobs; None if not available.
    `notes` say what was assumed and left out, `contradictions` where replies contradict themselves.
    `image_processor` is the identity of the processor that the run had.
    """

    chunks: Mapping[str, Sequences]
    sampling: Sampling
    version: int | None = None
    tops: tuple[Top, ...] | None = None
    trainer: Floats | None = None
    notes: tuple[str, ...] = ()
    contradictions: tuple[Finding, ...] = ()
    image_processor: dict[str, Any] | None = None


def read_record(
    record: Record, steps: Sequence[int], assumed: Sampling | None = None, version: int | None = None
) -> Sampled:
    """Read some steps of a record.

    `assumed` are the sampling options of a record of another trainer, by default those of its
    config; `version` is that of the model's weights, by default what the step starts from.

    Raises:
        RecordError: a step cannot be read.
        NothingToCompare: the run sampled nothing, no log-prob of a sampled token is known, or the
            record has pixels in the place of its pictures.
    """
    if record.header.lacks_images:
        raise NothingToCompare(
            f"{record.path} is a copy without the pictures of its rows: compare the original"
        )
    sampling = parse_sampling(record) if assumed is None else assumed
    foreign = record.header.trainer is not None
    chunks = {f"step-{number:06d}": read_step(record.step(number), foreign) for number in steps}
    notes = [note for number in steps if (note := left_out(record.step(number)))]
    if notes and not any(chunk.sampled.any() for chunk in chunks.values()):
        raise NothingToCompare(f"{record.path}: {notes[0]}, so there is nothing to compare with the model")
    has_plans = record.header.recording.has_plans
    starts = {record.step(number).plan(0).version for number in steps} if has_plans else set()
    if version is None and len(starts) == 1:
        [version] = starts
    trainer = read_trainer(record, steps, foreign)
    identity = record.header.environment.get("image_processor")
    return Sampled(chunks, sampling, version, trainer=trainer, notes=tuple(notes), image_processor=identity)


def left_out(step: RecordedStep) -> str | None:
    """Describe the rows of a step that are not compared; None if all are."""
    total = sum(step.num_rows(rank) for rank in range(step.manifest.num_ranks))
    unknown = step.num_unknown().items()
    counts = ", ".join(f"{key} of {count}" for key, count in unknown if key in COMPARED)
    return f"step {step.manifest.step}: {counts} of {total} rows unknown" if counts else None


def read_trainer(record: Record, steps: Sequence[int], foreign: bool) -> Floats | None:
    """Return the trainer's own recorded logprobs of the scored tokens, float64 [scored], or None."""
    columns = []
    for number in steps:
        step = record.step(number)
        for rank in range(step.manifest.num_ranks):
            aligned = step.trainer_logprobs(rank)
            if aligned is None:
                return None
            columns.append(aligned.astype(np.float64)[read_rank(step, rank, foreign).scored - 1])
    return np.concatenate(columns)


def parse_sampling(record: Record) -> Sampling:
    """Parse the sampling options of a record's config.

    Raises:
        NothingToCompare: the config has none: the run sampled nothing.
    """
    config: dict[str, Any] = record.header.config
    try:
        sampled, actor = config["gconfig"], config["actor"]
        engine = (record.header.allocation or "").partition(":")[0]
        return Sampling(
            temperature=float(sampled["temperature"]),
            top_p=float(sampled["top_p"]),
            top_k=limit_of(sampled["top_k"]),
            greedy=bool(sampled["greedy"]),
            trainer_dtype=str(actor["dtype"]),
            engine_dtype=quantised(config.get(engine, {}))
            or str((config[engine] if engine in ("sglang", "vllm") else actor)["dtype"]),
            kv_cache_dtype=text_named(config.get(engine, {}), "kv_cache_dtype"),
        )
    except KeyError as error:
        raise NothingToCompare(
            f"{record.path}: its config has no {error.args[0]!r}, so the run did not sample; give a record of an RL run"
        ) from error


def limit_of(top_k: float | None) -> int | None:
    """Return `top_k`, None where it is one of the numbers that mean no limit."""
    return int(top_k) if top_k is not None and 0 < top_k < TOP_K_OFF else None


def read_step(step: RecordedStep, foreign: bool = False) -> Sequences:
    """Concatenate the rows of all ranks of a step; `foreign` if another trainer recorded it.

    Raises:
        StepNotRecorded: a column is missing.
        DamagedRecord: bytes differ from their checksum.
    """
    return concatenate([read_rank(step, rank, foreign) for rank in range(step.manifest.num_ranks)])


def read_rank(step: RecordedStep, rank: int, foreign: bool) -> Sequences:
    """Read the rows of a rank; a token without a known log-prob counts as not sampled.

    NaN of our engines is a fault to report, NaN of another trainer means unknown.
    """
    has_experts = ROUTED_EXPERTS in step.batch_entry(rank)[1].tensors
    arrays = step.batch(rank, (*COLUMNS, ROUTED_EXPERTS) if has_experts else COLUMNS)
    rows = np.logical_and.reduce([step.known(rank, key) for key in COMPARED])
    sampled = arrays["loss_mask"].astype(bool) & np.repeat(rows, np.diff(arrays["cu_seqlens"]))
    if foreign:
        sampled &= ~np.isnan(arrays["logprobs"])
    return Sequences(
        input_ids=arrays["input_ids"].astype(np.int64),
        cu_seqlens=arrays["cu_seqlens"].astype(np.int64),
        sampled=sampled,
        engine_logprobs=arrays["logprobs"].astype(np.float64),
        versions=arrays["versions"].astype(np.int64) if step.known(rank, "versions").all() else None,
        prompt_id=arrays["prompt_id"].astype(np.int64),
        images=read_images(step, rank),
        experts=arrays.get(ROUTED_EXPERTS),
    )


def read_images(step: RecordedStep, rank: int) -> Images | None:
    """Read the images of a rank's rows; None for rows of text.

    Raises:
        NothingToCompare: the record has pixels in their place.
    """
    images = step.images(rank)
    if images is None and "image_units" in step.batch_entry(rank)[1].tensors:
        raise NothingToCompare(
            "the record has the pixels of its images and not the images: record with debug.dump_images original"
        )
    return images


def concatenate(batches: Sequence[Sequences]) -> Sequences:
    """Concatenate the rows of several batches."""
    ends = np.cumsum([0, *(int(batch.cu_seqlens[-1]) for batch in batches)])
    bounds = [batch.cu_seqlens[:-1] + begin for batch, begin in zip(batches, ends[:-1], strict=True)]

    def joined(name: str) -> Any:
        columns = [getattr(batch, name) for batch in batches]
        return None if any(column is None for column in columns) else np.concatenate(columns)

    columns = ("input_ids", "sampled", "engine_logprobs", "versions", "prompt_id", "worker", "cached_tokens")
    pictures = [batch.images for batch in batches]
    are_known = any(images is not None for images in pictures)
    return Sequences(
        cu_seqlens=np.concatenate([*bounds, ends[-1:]]),
        length_differences=tuple(difference for batch in batches for difference in batch.length_differences),
        images=tuple(one for batch in batches for one in batch.images or ((),) * batch.num_rows)
        if are_known
        else None,
        **{name: joined(name) for name in (*columns, "experts")},
    )


def model_dtype(path: str) -> str:
    """Return the dtype of a checkpoint if scoring supports it, else float32. Raises ModelError."""
    try:
        stored = str(AutoConfig.from_pretrained(path).get_text_config().dtype).removeprefix("torch.")
    except Exception as error:  # of any type, see `load_model`
        raise load_failure(path, error) from error
    return stored if stored in ("float32", "bfloat16") else "float32"


def published_noise(dtypes: Sequence[str], has_experts: bool) -> Noise:
    """Return the noise floor of the coarser of both sides' dtypes."""
    if any("float8" in dtype for dtype in dtypes):
        return NOISE["float8"]
    if all(dtype == "float32" for dtype in dtypes):
        return NOISE["float32"]
    return NOISE["bfloat16-moe" if has_experts else "bfloat16"]


def setting_of(
    sampling: Sampling, model_config: Any, temperature: float, dtype: str, version: int | None
) -> Setting:
    text = model_config.get_text_config()
    eos = text.eos_token_id
    has_experts = any(
        name in text.to_dict() for name in ("num_experts", "n_routed_experts", "num_local_experts")
    )
    return Setting(
        temperature=temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        greedy=sampling.greedy,
        eos_token_id=eos[0] if isinstance(eos, list) else eos,
        bos_token_id=text.bos_token_id,
        vocabulary_size=text.vocab_size,
        model_version=version,
        noise=published_noise((dtype, sampling.engine_dtype), has_experts),
        has_linear_attention="linear_attention" in (getattr(text, "layer_types", None) or ()),
        kv_cache_dtype=sampling.kv_cache_dtype,
        has_experts=has_experts,
    )


ASSUMED = {"temperature": 1.0, "top_p": 1.0, "top_k": None}
ENGINE_DTYPE = "bfloat16"  # the default of engines
OF_VALIDATION = ("val", "eval")


def sampling_of(
    config: Mapping[str, Any], given: Mapping[str, Any], dtype: str
) -> tuple[Sampling, tuple[str, ...]]:
    """Return the sampling options, and one sentence for each that was not given.

    `config` are the trainer's own options, {} if unknown, and `given` those of the user.
    """
    values, notes = dict(given), []
    for name, usual in ASSUMED.items():
        if name in given:
            continue
        found = {place: float(value) for place, value in named(config, name, (int, float))}
        if len(set(found.values())) == 1:
            place, values[name] = next(iter(found.items()))
            notes.append(f"{name} {values[name]:g}, as {place} in the trainer's config")
        else:
            values[name] = usual
            notes.append(f"{name} is not known: {'no limit' if usual is None else f'{usual:g}'} was assumed")
    engine_dtype = quantised(config)
    if engine_dtype is None:
        notes.append(f"the engine's precision is not known: {ENGINE_DTYPE} was assumed")
    sampling = Sampling(
        temperature=values["temperature"],
        top_p=values["top_p"],
        top_k=limit_of(values["top_k"]),
        greedy=values["temperature"] == 0.0,
        trainer_dtype=dtype,
        engine_dtype=engine_dtype or ENGINE_DTYPE,
        kv_cache_dtype=text_named(config, "kv_cache_dtype"),
    )
    return sampling, tuple(notes)


def text_named(options: Any, name: str) -> str | None:
    """Return the first text under a name, at any depth."""
    return next((text for _, text in named(options, name, (str,))), None)


def quantised(options: Any) -> str | None:
    """Return float8 where options of an engine declare it as the quantisation of its weights."""
    declared = text_named(options, "quantization") or ""
    return "float8" if "fp8" in declared or "float8" in declared else None


def named(options: Any, name: str, kinds: tuple[type, ...], path: tuple[str, ...] = ()) -> Iterator[Any]:
    """Yield the places and values of these types under a name, at any depth, but those of validation."""
    if isinstance(options, Mapping):
        for key, value in options.items():
            if not str(key).startswith(OF_VALIDATION):
                yield from named(value, name, kinds, (*path, str(key)))
    elif path and path[-1] in (name, f"rollout_{name}") and type(options) in kinds:
        yield ".".join(path), options
