"""Causes found by rescoring: engine, model or trainer differs from itself or from the other two."""

from consistency.case import Case, Finding, Setting

# Both sides of a comparison round, so up to twice one side's noise is still noise.
NOISE_FACTOR = 2.0


def decoding_differs(case: Case) -> Finding | None:
    """R40, R43, R48: the engine's decoding differs from its prefill, which matches the model."""
    rescoring = case.rescoring
    if rescoring is None or rescoring.decode is None:
        return None
    floor = NOISE_FACTOR * max(case.level, rescoring.engine_repeat)
    if rescoring.decode <= floor or rescoring.prefill >= rescoring.decode / NOISE_FACTOR:
        return None
    cause, why, fix = decoding_fault(case.setting)
    return Finding(
        cause,
        f"the engine's decoding differs from its own prefill{why}",
        0.9,
        f"engine sampling against engine rescoring: mean |A - B| {rescoring.decode:.2g}; engine rescoring against "
        f"the model: |B - C| {rescoring.prefill:.2g}; the engine's run-to-run variation: {rescoring.engine_repeat:.2g}",
        "start the engine without CUDA graphs and with a bf16 KV cache: |A - B| must fall",
        fix,
    )


def decoding_fault(setting: Setting) -> tuple[str, str, str]:
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
        "check the decode path: SGLang --disable-cuda-graph, --kv-cache-dtype auto; vLLM --enforce-eager",
    )


def model_not_repeatable(case: Case) -> Finding | None:
    """R47: the model computes different logprobs for the same batch."""
    rescoring = case.rescoring
    if rescoring is None or rescoring.model_repeat <= 1e-7:
        return None
    return Finding(
        "R47",
        "the model's logprobs are not reproducible",
        0.8,
        f"the same batch scored twice differs by {rescoring.model_repeat:.2g} on average",
        "score twice in evaluation mode with deterministic kernels: the difference must be 0",
        "model.eval(), dropout 0, torch.use_deterministic_algorithms(True)",
        fault=rescoring.model_repeat > case.level,
    )


def batch_variant(case: Case) -> Finding | None:
    """R39: the model's logprobs depend on the batch by more than its dtype allows."""
    rescoring = case.rescoring
    if rescoring is None or rescoring.model_alone <= NOISE_FACTOR * case.level:
        return None
    return Finding(
        "R39",
        "the model's logprobs depend on the other rows of the batch",
        0.8,
        f"rows scored alone and packed differ by {rescoring.model_alone:.2g} on average, the same batch by {rescoring.model_repeat:.2g}",
        "score one row per pass: the difference to the engine must fall",
        "pass sequence boundaries (cu_seqlens) to every attention and convolution; batch-invariant kernels",
    )


def trainer_differs(case: Case) -> Finding | None:
    """R20: the trainer's packed path differs from the model, so the fault is the trainer's."""
    check = case.trainer_check
    if (
        check is None
        or check.trainer_model <= NOISE_FACTOR * case.level
        or check.engine_model > check.trainer_model / NOISE_FACTOR
    ):
        return None
    return Finding(
        "R20",
        "the trainer's own path differs from the model",
        0.9,
        f"trainer (from {check.source}) against model: mean |difference| {check.trainer_model:.2g} over "
        f"{check.num_tokens} tokens; engine against model: {check.engine_model:.2g}",
        "give the trainer one sequence per micro-batch: the difference must vanish",
        "pass the boundaries of packed sequences to every layer (cu_seqlens); compare the trainer's temperature and dtype",
    )


CAUSES = (trainer_differs, decoding_differs, model_not_repeatable, batch_variant)
