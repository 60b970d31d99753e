# ruff: noqa: RUF009  (option() and section() return dataclass fields)
"""How completions are sampled, and where: sampling options, rollout client options, SGLang server options."""

from dataclasses import dataclass
from typing import Any

from areal_core.config.option import ABOVE_0, AT_LEAST_0, AT_LEAST_1, POSITIVE_SHARE, SHARE, option, section


@dataclass
class GenerationHyperparameters:
    """How one completion is sampled."""

    n_samples: int = option(1, "Completions per prompt: the size of a group.", limits=AT_LEAST_1)
    max_new_tokens: int = option(16384, "Most tokens to sample per completion.", limits=AT_LEAST_1)
    min_new_tokens: int = option(0, "Fewest tokens to sample per completion.", limits=AT_LEAST_0)
    max_tokens: int = option(32768, "Most tokens of prompt and completion together.", limits=AT_LEAST_1)
    greedy: bool = option(False, "Take the likeliest token instead of sampling.")
    top_p: float = option(
        1.0, "Nucleus sampling: keep the likeliest tokens up to this probability.", limits=POSITIVE_SHARE
    )
    top_k: int = option(
        100_000_000, "Keep only so many of the likeliest tokens; the default keeps all.", limits=AT_LEAST_1
    )
    temperature: float = option(1.0, "Divides the logits before sampling.", limits=AT_LEAST_0)
    stop_token_ids: list[int] = section(list, "Tokens that end a completion, besides EOS and padding.")
    ignore_eos: bool = option(False, "Go on sampling after EOS.")
    skip_special_tokens: bool = option(True, "Leave special tokens out of decoded text.")
    stop: list[str] | None = option(None, "Texts that end a completion.")
    frequency_penalty: float = option(0.0, "Lowers the logits of tokens by how often they have occurred.")
    lora_name: str = option(
        "default_lora", "Name under which the server knows the adapter, before its version."
    )
    use_beam_search: bool = option(False, "Search instead of sampling.")


@dataclass
class AgentConfig:
    """How an agent that talks to an OpenAI-compatible endpoint is run."""

    agent_cls_path: str | None = option(None, "Import path of the agent class.")
    host: str = option(
        "127.0.0.1", "Interface of the proxy; others than loopback want an admin key of your own."
    )
    port: int = option(0, "Port of the proxy; 0 for a free one.", limits=AT_LEAST_0)
    max_body_bytes: int = option(8 << 20, "Largest request that the proxy reads.", limits=AT_LEAST_1)
    admin_api_key: str = option("areal-admin-key", "Key for the administrative endpoints of the proxy.")
    mode: str = option(
        "inline",
        "Where the agent runs: beside the trainer, in processes of its own, or with somebody who opens sessions.",
        ("inline", "subproc", "online"),
    )
    tool_call_parser: str = option(
        "qwen", "How the model writes tool calls, by SGLang's names; 'template' for the tokenizer's own."
    )
    reasoning_parser: str = option("qwen3", "How the model marks reasoning, by SGLang's names.")
    chat_template_type: str = option("hf", "How messages become tokens.", ("hf", "concat"))
    engine_max_tokens: int | None = option(
        None, "Most tokens of prompt and completion of one call.", limits=AT_LEAST_1
    )
    turn_discount: float = option(
        1.0, "Factor on a later turn's reward when it is passed to the turn before.", limits=SHARE
    )
    export_style: str = option(
        "individual", "One training row a call, or one a conversation.", ("individual", "concat")
    )
    subproc_max_workers: int = option(4, "Processes for agents in mode subproc.", limits=AT_LEAST_1)
    session_timeout_seconds: int = option(
        3600, "Seconds after which an idle session is dropped.", limits=ABOVE_0
    )
    set_reward_finish_timeout: float = option(
        0.0, "Seconds to wait for a late reward after a session has ended.", limits=AT_LEAST_0
    )


@dataclass
class InferenceEngineConfig:
    """The rollout client: how many episodes run at once, how stale they may be, how long to wait for a server."""

    experiment_name: str | None = option(None, "Empty: the experiment's.")
    trial_name: str | None = option(None, "Empty: the experiment's.")
    fileroot: str | None = option(None, "Empty: cluster.fileroot.")
    backend: str = option(
        "", "Where rollouts run, if allocation_mode does not say it: 'sglang:d4' or 'embedded'."
    )
    max_concurrent_rollouts: int | None = option(
        None,
        "Most prompts (with all their samples) at once over all ranks; empty: consumer_batch_size.",
        limits=AT_LEAST_1,
    )
    queue_size: int | None = option(
        None, "Kept for older files; prompts wait in the loader here.", limits=AT_LEAST_1
    )
    consumer_batch_size: int = option(
        1, "Prompts that the trainer takes per step; must equal train_dataset.batch_size."
    )
    max_head_offpolicyness: int = option(
        0,
        "How many weight versions the trainer may be ahead of a sample's oldest token; 0: synchronous.",
        limits=AT_LEAST_0,
    )
    max_failures: int = option(
        0,
        "Prompts per rank and step whose episodes may raise before the run stops with their exception.",
        limits=AT_LEAST_0,
    )
    enable_rollout_tracing: bool = option(False, "Write a trace of the run, as perf_tracer.enabled does.")
    check_trajectory_format: bool = option(False, "Check the tensors that every episode returns.")
    tokenizer_path: str = option("", "Tokenizer of the dumped text; empty: tokenizer_path of the run.")
    dump_to_file: bool = option(False, "Write decoded episodes below the logs: rollout/VERSION/PROMPT.jsonl.")
    setup_timeout: float = option(300.0, "Seconds to wait for servers to become healthy.", limits=ABOVE_0)
    request_timeout: float = option(3600.0, "Seconds to wait for one reply.", limits=ABOVE_0)
    request_retries: int = option(3, "Attempts per request.", limits=AT_LEAST_0)
    pause_mode: str = option(
        "abort",
        "What a weight push does to requests in flight: cut them, recompute them, or let them keep their cache.",
        ("abort", "retract", "in_place"),
    )
    verify_weights_every: int = option(
        16,
        "Compare the servers' weights with the trainer's after the first push and every so many; 0: never.",
        limits=AT_LEAST_0,
    )
    pause_grace_period: float = option(
        0.0, "Seconds between pausing the servers and sending weights.", limits=AT_LEAST_0
    )
    use_lora: bool = option(False, "Send servers the adapter; false: the model with the adapter in it.")
    agent: AgentConfig = section(AgentConfig, "Agents behind an OpenAI-compatible endpoint.")
    return_routed_experts: bool = option(False, "Keep which experts each token was routed to.")
    routing_strategy: str = option("round_robin", "How prompts are spread over servers.", ("round_robin",))
    schedule_policy: str = option("round_robin", "Older name of routing_strategy.", ("round_robin",))
    scheduling_spec: Any = option(None, "Placement for a single-controller scheduler; nothing here reads it.")
    scheduling_strategy: Any = option(
        None, "Placement for a single-controller scheduler; nothing here reads it."
    )
    _version: str = option("v1", "Interface version of a single-controller worker.", ("v1",))


@dataclass
class SGLangConfig:
    """The SGLang server. A field becomes the flag of the same name with dashes; None, False, '' and [] are left out."""

    model_path: str = option("", "Model to serve; empty: actor.path.")
    random_seed: int = option(1, "Seed of the sampler; each server adds its number.")
    skip_tokenizer_init: bool = option(False, "Serve token ids only.")
    disable_cuda_graph: bool = option(False, "Run decoding without CUDA graphs.")
    disable_radix_cache: bool = option(True, "Do not share prefixes between requests.")
    disable_overlap_schedule: bool = option(False, "Do not overlap scheduling with the forward pass.")
    disable_cuda_graph_padding: bool = option(False, "Use CUDA graphs only at the captured batch sizes.")
    disable_outlines_disk_cache: bool = option(False, "Keep the grammar cache off the disk.")
    disable_custom_all_reduce: bool = option(False, "Use NCCL for every all-reduce.")
    enable_nccl_nvls: bool = option(False, "NVLink SHARP for heavy prefill.")
    enable_mixed_chunk: bool = option(False, "Mix prefill and decoding in one batch.")
    enable_dp_attention: bool = option(False, "Data-parallel attention, tensor-parallel MLP.")
    enable_ep_moe: bool = option(False, "Expert parallelism.")
    enable_deepep_moe: bool = option(False, "Expert parallelism through DeepEP.")
    enable_torch_compile: bool = option(False, "Compile the model.")
    enable_p2p_check: bool = option(False, "Check peer access instead of assuming it.")
    enable_memory_saver: bool = option(False, "Let memory be released and taken back while the server lives.")
    enable_multithread_load: bool = option(False, "Load weights with several threads.")
    enable_fast_load: bool = option(False, "Load weights with the fast loader.")
    enable_metrics: bool = option(True, "Serve Prometheus metrics.")
    enable_multimodal: bool = option(False, "Serve images as well as text.")
    allow_auto_truncate: bool = option(False, "Cut prompts that are too long instead of refusing them.")
    enable_lora: bool | None = option(None, "Serve adapters.")
    torch_compile_max_bs: int = option(32, "Largest batch to compile for.")
    torchao_config: str = option("", "Quantisation by torchao.")
    triton_attention_reduce_in_fp32: bool = option(False, "Reduce attention in fp32.")
    triton_attention_num_kv_splits: int = option(8, "Splits of the key-value cache in the triton decoder.")
    cuda_graph_max_bs: int | None = option(None, "Older name of cuda_graph_max_bs_decode.")
    cuda_graph_bs: list[int] | None = option(None, "Older name of cuda_graph_bs_decode.")
    cuda_graph_max_bs_decode: int | None = option(None, "Largest batch to capture for decoding.")
    cuda_graph_bs_decode: list[int] | None = option(None, "Batch sizes to capture for decoding.")
    attention_backend: str | None = option("fa3", "Attention kernels; a CPU server takes torch_native.")
    sampling_backend: str | None = option(None, "Sampling kernels.")
    context_length: int | None = option(32768, "Longest sequence that is served.")
    mem_fraction_static: float | None = option(0.9, "Share of memory for weights and key-value cache.")
    max_running_requests: int | None = option(None, "Most requests in a batch.")
    max_total_tokens: int | None = option(None, "Size of the key-value cache in tokens.")
    chunked_prefill_size: int | None = option(
        -1, "Tokens per prefill chunk; -1 is off, which keeps logprobs exact."
    )
    max_prefill_tokens: int = option(32768, "Most tokens in one prefill batch.")
    schedule_policy: str = option("lpm", "Order in which waiting requests are taken.")
    schedule_conservativeness: float = option(1.0, "Above 1: admit fewer requests.")
    cpu_offload_gb: int = option(0, "GiB of weights to keep in host memory.")
    dtype: str = option("bfloat16", "Data type of weights and activations.")
    kv_cache_dtype: str = option("auto", "Data type of the key-value cache.")
    dp_size: int = option(1, "Data-parallel replicas inside one server.")
    ep_size: int = option(1, "Expert-parallel size.")
    max_loras_per_batch: int = option(8, "Most adapters in one batch.")
    max_lora_rank: int | None = option(None, "Largest rank of an adapter.")
    lora_target_modules: list[str] | None = option(
        None, "Modules that adapters may change; empty: actor.target_modules."
    )
    lora_paths: list[str] | None = option(None, "Adapters to load at the start.")
    max_loaded_loras: int = option(8, "Most adapters in memory.")
    lora_backend: str = option("triton", "Kernels for adapters; a CPU server takes torch_native.")
    log_level: str = option("warning", "Log level.")
    log_level_http: str | None = option("warning", "Log level of the HTTP layer.")
    log_requests: bool = option(False, "Log every request.")
    log_requests_level: int = option(0, "How much of a request to log.")
    show_time_cost: bool = option(False, "Log the time of each stage.")
    decode_log_interval: int = option(1, "Decoding steps between two log lines.")
    num_continuous_decode_steps: int = option(1, "Decoding steps between two scheduling rounds.")
