# ruff: noqa: RUF009  (option() and section() return dataclass fields)
"""Options of sampling, of the rollout client and of inference servers."""

from dataclasses import dataclass
from typing import Any

from areal_core.config.option import (
    ABOVE_0,
    AT_LEAST_0,
    AT_LEAST_1,
    FINITE,
    POSITIVE_SHARE,
    SHARE,
    option,
    section,
)


@dataclass
class GenerationHyperparameters:
    """Sampling of a completion."""

    n_samples: int = option(1, "Completions per prompt: the size of a group.", limits=AT_LEAST_1)
    max_new_tokens: int = option(16384, "Maximum tokens to sample per completion.", limits=AT_LEAST_1)
    min_new_tokens: int = option(0, "Minimum tokens to sample per completion.", limits=AT_LEAST_0)
    max_tokens: int = option(32768, "Maximum tokens of prompt and completion together.", limits=AT_LEAST_1)
    greedy: bool = option(False, "Greedy decoding instead of sampling.")
    top_p: float = option(1.0, "Nucleus sampling: keep tokens up to this probability.", limits=POSITIVE_SHARE)
    top_k: int = option(100_000_000, "Keep the k most likely tokens; by default all.", limits=AT_LEAST_1)
    temperature: float = option(1.0, "Divides the logits before sampling.", limits=AT_LEAST_0)
    stop_token_ids: list[int] = section(list, "Tokens that end a completion, in addition to EOS and padding.")
    ignore_eos: bool = option(False, "Continue sampling after EOS.")
    skip_special_tokens: bool = option(True, "Leave special tokens out of decoded text.")
    stop: list[str] | None = option(None, "Texts that end a completion.")
    frequency_penalty: float = option(0.0, "Lowers the logits of tokens by how often they have occurred.")
    seed: int | None = option(None, "Seed of each request; empty: the server's own random numbers.")
    reward_normalization: bool = option(
        False, "Agents: rewards of episodes become (x - mean) / std of their group; rewards are kept."
    )
    drop_incomplete_group: bool = option(False, "Drop prompts of which a sample was left out.")
    lora_name: str = option("default_lora", "Name of the adapter on the server, before its version.")
    use_beam_search: bool = option(False, "Beam search instead of sampling.")


@dataclass
class AgentConfig:
    """Options of agents, which call an OpenAI-compatible endpoint."""

    agent_cls_path: str | None = option(None, "Import path of the agent class.")
    host: str = option("127.0.0.1", "Interface; any other than loopback needs a secret admin key.")
    port: int = option(0, "Port of the proxy; 0 for a free one.", limits=AT_LEAST_0)
    max_body_bytes: int = option(8 << 20, "Maximum size of a request to the proxy.", limits=AT_LEAST_1)
    admin_api_key: str = option("", "Administrative key; empty: a random one, in a file that is logged.")
    mode: str = option("inline", "In the trainer's process, or a client.", ("inline", "subproc", "online"))
    tool_call_parser: str = option("qwen", "Format of tool calls as in SGLang; 'template': the tokenizer's.")
    reasoning_parser: str = option("qwen3", "Format of reasoning, by SGLang's names.")
    chat_template_type: str = option("hf", "Prompts: render all turns, or append.", ("hf", "concat"))
    remote_images: bool = option(False, "Fetch pictures of http(s) URLs, not only data: URLs.")
    engine_max_tokens: int | None = option(None, "Longest prompt with completion.", limits=AT_LEAST_1)
    turn_discount: float = option(1.0, "Factor on a later turn's reward, passed one turn back.", limits=SHARE)
    export_style: str = option("individual", "A row per call, or conversation.", ("individual", "concat"))
    failed_reward: float = option(0.0, "Last reward of an episode that the model failed.", limits=FINITE)
    failure_errors: list[str] = section(list, "Exceptions that mean it failed: 'package.Class' or 'Class'.")
    message_preprocessors: list[str] = section(
        list, "Import paths of classes whose objects change the messages of Anthropic's API, in order."
    )
    drop_retry_orphans: bool = option(False, "Leave out answers to a repeated request that were not used.")
    subproc_max_workers: int = option(4, "Without effect: agents run in this process.", limits=AT_LEAST_1)
    session_timeout_seconds: int = option(3600, "Idle seconds until a session is dropped.", limits=ABOVE_0)
    set_reward_finish_timeout: float = option(0.0, "Seconds to wait for a late reward.", limits=AT_LEAST_0)


@dataclass
class InferenceEngineConfig:
    """The rollout client: concurrency, staleness, timeouts, weight updates."""

    experiment_name: str | None = option(None, "Empty: the experiment's.")
    trial_name: str | None = option(None, "Empty: the experiment's.")
    fileroot: str | None = option(None, "Empty: cluster.fileroot.")
    backend: str = option("", "Rollout, if allocation_mode is empty: 'sglang:d4', 'embedded'.")
    max_concurrent_rollouts: int | None = option(
        None, "Maximum prompts in flight over all ranks; empty: consumer_batch_size.", limits=AT_LEAST_1
    )
    queue_size: int | None = option(None, "Older and unused: prompts wait in the loader.", limits=AT_LEAST_1)
    consumer_batch_size: int = option(1, "Prompts per training step; must equal train_dataset.batch_size.")
    deterministic_sampling: bool = option(
        False,
        "Seed each request by its prompt, sample and turn; SGLang needs enable_deterministic_inference.",
    )
    max_head_offpolicyness: int = option(0, "Most staleness in versions; 0: synchronous.", limits=AT_LEAST_0)
    max_failures: int = option(0, "Prompts per rank and step that may raise.", limits=AT_LEAST_0)
    enable_rollout_tracing: bool = option(False, "Write a trace of the run, as perf_tracer.enabled does.")
    check_trajectory_format: bool = option(False, "Check the tensors that every episode returns.")
    tokenizer_path: str = option("", "Tokenizer of the dumped text; empty: tokenizer_path of the run.")
    dump_to_file: bool = option(False, "Write decoded episodes below the logs: rollout/VERSION/PROMPT.jsonl.")
    setup_timeout: float = option(300.0, "Seconds to wait for servers to become healthy.", limits=ABOVE_0)
    request_timeout: float = option(3600.0, "Seconds to wait for one reply.", limits=ABOVE_0)
    request_retries: int = option(3, "Attempts per request.", limits=AT_LEAST_0)
    pause_mode: str = option(
        "abort",
        "Requests in flight at a weight update: abort, recompute or keep.",
        ("abort", "retract", "in_place"),
    )
    verify_weights_every: int = option(16, "Check weights each n-th update; 0: never.", limits=AT_LEAST_0)
    pause_grace_period: float = option(0.0, "Seconds from pausing servers to sending.", limits=AT_LEAST_0)
    use_lora: bool = option(False, "Send servers the adapter; false: the merged weights.")
    agent: AgentConfig = section(AgentConfig, "Agents behind an OpenAI-compatible endpoint.")
    return_routed_experts: bool = option(False, "Train with the experts that the engine chose.")
    return_routed_weights: bool = option(
        False, "And with the engine's weights of them, as constants: the router is not trained."
    )
    routing_strategy: str = option("round_robin", "Distribution of prompts over servers.", ("round_robin",))
    schedule_policy: str = option("round_robin", "Older name of routing_strategy.", ("round_robin",))
    scheduling_spec: Any = option(None, "Environment, command, cores, memory and image of the servers.")
    scheduling_strategy: Any = option(None, "{type: colocation, target: actor}: share the trainer's devices.")
    _version: str = option("v1", "Interface version of a single-controller worker.", ("v1", "v2"))


@dataclass
class SGLangConfig:
    """The SGLang server.

    A field becomes the flag of the same name with dashes; None, False, '' and [] are left out.
    """

    model_path: str = option("", "Model to serve; empty: actor.path.")
    random_seed: int = option(1, "Seed of the sampler; each server adds its index.")
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
    enable_return_routed_experts: bool = option(False, "Set by rollout.return_routed_experts.")
    enable_torch_compile: bool = option(False, "Compile the model.")
    enable_p2p_check: bool = option(False, "Check peer access instead of assuming it.")
    enable_memory_saver: bool = option(False, "Let a running server release and reacquire memory.")
    enable_multithread_load: bool = option(False, "Load weights with several threads.")
    enable_fast_load: bool = option(False, "Load weights with the fast loader.")
    enable_metrics: bool = option(True, "Serve Prometheus metrics.")
    enable_deterministic_inference: bool = option(False, "Results do not depend on the batch; seeds count.")
    load_format: str = option("auto", "Format of the weights on disk.")
    enable_multimodal: bool = option(False, "Serve images as well as text.")
    allow_auto_truncate: bool = option(False, "Truncate prompts that are too long instead of refusing them.")
    enable_lora: bool | None = option(None, "Serve adapters.")
    torch_compile_max_bs: int = option(32, "Largest batch to compile for.")
    torchao_config: str = option("", "Quantisation by torchao.")
    triton_attention_reduce_in_fp32: bool = option(False, "Reduce attention in fp32.")
    triton_attention_num_kv_splits: int = option(8, "Splits of the key-value cache in the triton decoder.")
    cuda_graph_max_bs: int | None = option(None, "Older name of cuda_graph_max_bs_decode.")
    cuda_graph_bs: list[int] | None = option(None, "Older name of cuda_graph_bs_decode.")
    cuda_graph_max_bs_decode: int | None = option(None, "Largest batch to capture for decoding.")
    cuda_graph_bs_decode: list[int] | None = option(None, "Batch sizes to capture for decoding.")
    attention_backend: str | None = option("fa3", "Attention kernels; a CPU server uses torch_native.")
    sampling_backend: str | None = option(None, "Sampling kernels.")
    context_length: int | None = option(32768, "Maximum sequence length.")
    mem_fraction_static: float | None = option(0.9, "Fraction of memory for weights and key-value cache.")
    max_running_requests: int | None = option(None, "Maximum requests in a batch.")
    max_total_tokens: int | None = option(None, "Size of the key-value cache in tokens.")
    chunked_prefill_size: int | None = option(-1, "Tokens of a prefill chunk; -1: off, exact logprobs.")
    max_prefill_tokens: int = option(32768, "Maximum tokens in one prefill batch.")
    schedule_policy: str = option("lpm", "Scheduling order of waiting requests.")
    schedule_conservativeness: float = option(1.0, "Above 1: admit fewer requests.")
    cpu_offload_gb: int = option(0, "GiB of weights to keep in host memory.")
    dtype: str = option("bfloat16", "Data type of weights and activations.")
    kv_cache_dtype: str = option("auto", "Data type of the key-value cache.")
    dp_size: int = option(1, "Data-parallel replicas inside one server.")
    ep_size: int = option(1, "Expert-parallel size.")
    max_loras_per_batch: int = option(8, "Maximum adapters in one batch.")
    max_lora_rank: int | None = option(None, "Maximum rank of an adapter.")
    lora_target_modules: list[str] | None = option(None, "Modules of adapters; empty: the actor's.")
    lora_paths: list[str] | None = option(None, "Adapters to load at the start.")
    max_loaded_loras: int = option(8, "Maximum adapters in memory.")
    lora_backend: str = option("triton", "Kernels for adapters; a CPU server uses torch_native.")
    log_level: str = option("warning", "Log level.")
    log_level_http: str | None = option("warning", "Log level of the HTTP layer.")
    log_requests: bool = option(False, "Log every request.")
    log_requests_level: int = option(0, "How much of a request to log.")
    show_time_cost: bool = option(False, "Log the time of each stage.")
    decode_log_interval: int = option(1, "Decoding steps between two log lines.")
    num_continuous_decode_steps: int = option(1, "Decoding steps between two scheduling rounds.")


@dataclass
class VLLMConfig:
    """The vLLM server.

    A field becomes the flag of the same name with dashes; None, False, '' and [] are left out.
    """

    python: str = option("", "Interpreter of the environment that has vLLM; empty: that of the launcher.")
    model: str = option("", "Model to serve; empty: actor.path.")
    seed: int = option(1, "Seed of the sampler; each server adds its index.")
    skip_tokenizer_init: bool = option(False, "Serve token ids only.")
    enforce_eager: bool = option(False, "Run without CUDA graphs.")
    dtype: str = option("bfloat16", "Data type of weights and activations.")
    distributed_executor_backend: str = option("mp", "How a server starts its own ranks.")
    max_num_seqs: int = option(256, "Maximum requests in a batch.")
    block_size: int = option(16, "Tokens per block of the key-value cache; a CPU server chooses its own.")
    swap_space: int = option(4, "GiB of host memory for swapped blocks, in older versions.")
    cpu_offload_gb: float = option(0, "GiB of weights to keep in host memory.")
    disable_sliding_window: bool = option(True, "Attend to the whole sequence in every layer.")
    max_model_len: int | None = option(32768, "Maximum sequence length.")
    max_seq_len_to_capture: int | None = option(None, "Longest sequence of CUDA graphs, in older versions.")
    no_enable_chunked_prefill: bool = option(False, "Compute each prompt in one piece.")
    no_enable_prefix_caching: bool = option(True, "Do not share prefixes between requests.")
    gpu_memory_utilization: float = option(0.9, "Fraction of GPU memory for weights and key-value cache.")
    worker_extension_cls: str = option("", "Class added to vLLM's workers; always our own.")
    enable_sleep_mode: bool = option(False, "Let a running server release and reacquire memory.")
    uvicorn_log_level: str = option("warning", "Log level of the HTTP layer.")
    gdn_prefill_backend: str | None = option(None, "Prefill kernels of gated delta networks.")
    enable_lora: bool = option(False, "Serve adapters.")
    max_lora_rank: int = option(16, "Maximum rank of an adapter.")
    max_loras: int = option(8, "Maximum adapters in one batch and in memory.")
    lora_modules: list[str] | None = option(None, "Adapters to load at the start.")
