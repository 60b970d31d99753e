"""What asking engine, model and trainer again tells: who disagrees with itself, and who with the two others."""

from consistency.case import Case, Finding, Setting

# Both sides of a comparison round, so noise reaches twice a side's own before it is anything else.
MUCH = 2.0


def decoding_differs(case: Case) -> Finding | None:
    """R40, R43, R48: the engine's decoding disagrees with its own prefill, which agrees with the model."""
    rescoring = case.rescoring
    if rescoring is None or rescoring.decode is None:
        return None
    floor = MUCH * max(case.level, rescoring.engine_repeat)
    if rescoring.decode <= floor or rescoring.prefill >= rescoring.decode / MUCH:
        return None
    cause, why, fix = decoding_fault(case.setting)
    return Finding(
        cause,
        f"the engine's decoding differs from its own prefill{why}",
        0.9,
        f"told when sampled against scored again: mean |A - B| {rescoring.decode:.2g}; scored again against the model: "
        f"|B - C| {rescoring.prefill:.2g}; the engine's repeat: {rescoring.engine_repeat:.2g}",
        "start the engine without CUDA graphs and with a bf16 KV cache: |A - B| must fall",
        fix,
    )


def decoding_fault(setting: Setting) -> tuple[str, str, str]:
    """Cause, what there is to suspect, and fix, by what is known of engine and model."""
    if setting.kv_cache_dtype is not None and "8" in setting.kv_cache_dtype:
        return (
            "R43",
            f": its KV cache is {setting.kv_cache_dtype}",
            "a bf16 KV cache (SGLang --kv-cache-dtype auto), or calibrated scales",
        )
    if setting.has_linear_attention:
        return (
            "R48",
            ": chunked and recurrent linear attention",
            "the same kernel of linear attention for prefill and decode",
        )
    return (
        "R40",
        "",
        "look at the decode path: SGLang --disable-cuda-graph, --kv-cache-dtype auto; vLLM --enforce-eager",
    )


def model_not_repeatable(case: Case) -> Finding | None:
    """R47: the model gives other logprobs for the same batch."""
    rescoring = case.rescoring
    if rescoring is None or rescoring.model_repeat <= 1e-7:
        return None
    return Finding(
        "R47",
        "the model does not repeat its own logprobs",
        0.8,
        f"the same batch scored twice differs by {rescoring.model_repeat:.2g} on average",
        "score twice in evaluation mode with deterministic kernels: the difference must be 0",
        "model.eval(), dropout 0, torch.use_deterministic_algorithms(True)",
        fault=rescoring.model_repeat > case.level,
    )


def batch_variant(case: Case) -> Finding | None:
    """R39: the model's logprobs depend on what else is in the batch, by more than its dtype allows."""
    rescoring = case.rescoring
    if rescoring is None or rescoring.model_alone <= MUCH * case.level:
        return None
    return Finding(
        "R39",
        "the model's logprobs depend on their neighbours in the batch",
        0.8,
        f"rows scored alone and packed differ by {rescoring.model_alone:.2g} on average, the same batch by {rescoring.model_repeat:.2g}",
        "score with one row a pass: the difference to the engine must fall",
        "pass sequence boundaries (cu_seqlens) to every attention and convolution; batch-invariant kernels",
    )


def trainer_differs(case: Case) -> Finding | None:
    """R20: the trainer's packed path says something else than the model, so the fault is on the trainer's side."""
    third = case.third
    if (
        third is None
        or third.trainer_model <= MUCH * case.level
        or third.engine_model > third.trainer_model / MUCH
    ):
        return None
    return Finding(
        "R20",
        "the trainer's own path differs from the model",
        0.9,
        f"trainer (from {third.source}) against model: mean |difference| {third.trainer_model:.2g} over {third.num_tokens} tokens; "
        f"engine against model: {third.engine_model:.2g}",
        "give the trainer one sequence a micro-batch: the difference must vanish",
        "pass the boundaries of packed sequences to every layer (cu_seqlens); compare the trainer's temperature and dtype",
    )


CAUSES = (trainer_differs, decoding_differs, model_not_repeatable, batch_variant)
