"""The tables behind `hangdoctor.waits`: which function of which file waits for what.

Names are the last component of a qualified name, files are below site-packages; both are regular
expressions that must match in full. `USER` as a file means: not in a library. A new framework is a
new row here, never a new branch in the code.
"""

from dataclasses import dataclass

# Waits that end only when other ranks arrive: a rank in one is a victim while some rank is not.
PEER_KINDS = ("collective", "p2p", "device", "backward", "store")

C10D = "torch/distributed/distributed_c10d.py"
COLLECTIVES = {
    "barrier", "monitored_barrier", "all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_into_tensor",
    "all_gather_single", "_all_gather_base", "all_gather_object", "all_gather_coalesced", "reduce_scatter",
    "reduce_scatter_tensor", "reduce_scatter_single", "_reduce_scatter_base", "broadcast", "broadcast_object_list",
    "gather", "gather_object", "scatter", "scatter_object_list", "all_to_all", "all_to_all_single", "reduce",
}  # fmt: skip
ROOTED = {
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "scatter",
    "scatter_object_list",
    "reduce",
}
P2P = {"send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list"}
COLLECTIVE_FILES = (
    C10D, "torch/distributed/_functional_collectives.py", "deepspeed/comm/comm.py", "deepspeed/comm/torch.py",
    "torch/distributed/nn/functional.py", "vllm/distributed/parallel_state.py", "sglang/srt/distributed/parallel_state.py",
    "vllm/distributed/device_communicators/pynccl.py", "sglang/srt/distributed/device_communicators/pynccl.py",
    "ray/util/collective/collective.py", "horovod/torch/mpi_ops.py",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pattern:
    """One row: the last component of a function name and the end of its file, as regular
    expressions.
    """

    kind: str
    operation: str
    function: str
    file: str


# A worker without a task waits in this loop; one with a task runs inside it.
WORKER_LOOP = "worker loop"

IMPORT_LOCK = "import lock"
# A server without work waits in these.
EVENT_LOOP = "event loop"
ENGINE_LOOP = "engine loop"

# fmt: off
SPECIFIC = (
    Pattern(
        "collective", "all_gather",
        r"foreach_all_gather|foreach_all_gather_copy_out|_all_gather_flat_param",
        r"torch/distributed/.*fsdp/.*",
    ),
    Pattern(
        "collective", "reduce_scatter",
        r"foreach_reduce|_reduce_grad",
        r"torch/distributed/.*fsdp/.*",
    ),
    Pattern(
        "collective", "wait_tensor",
        r"wait_tensor|trigger_wait|_wait_all",
        r"torch/distributed/_functional_collectives.*",
    ),
    Pattern(
        "collective", "broadcast",
        r"_sync_params_and_buffers|_sync_module_states|_distributed_broadcast_coalesced|_broadcast_coalesced|"
        r"_sync_buffers",
        r"torch/(distributed/utils|nn/parallel/distributed).py",
    ),
    Pattern(
        "collective", "verify_params",
        r"_verify_param_shape_across_processes",
        r"torch/distributed/utils.py",
    ),
    Pattern(
        "collective", "broadcast",
        r"broadcast_pyobj|broadcast_recv_input",
        r"sglang/.*",
    ),
    Pattern(
        "collective", "shm_broadcast",
        r"acquire_read|acquire_write|dequeue|broadcast_object",
        r".*/shm_broadcast.py",
    ),
    Pattern("collective", "synchronize", r"synchronize|_synchronize", r"horovod/.*"),
    Pattern(
        "p2p", "pipeline",
        r"_communicate|_communicate_shapes|recv_forward|recv_backward|send_forward.*|send_backward.*",
        r"(?!torch/).*(p2p_communication|pipeline_parallel/schedules).py",
    ),
    Pattern(
        "p2p", "pipeline",
        r"_wait_batch_p2p|_batch_p2p|recv_(forward|backward)\w*|(fwd|bwd)_recv\w*",
        r"torch/distributed/pipelining/.*",
    ),
    Pattern("p2p", "recv", r"recv_(tensor_dict|object|tensor)|_pp_recv\w*", r"(vllm|sglang)/.*"),
    Pattern("p2p", "send", r"send_(tensor_dict|object|tensor)|_pp_send\w*", r"(vllm|sglang)/.*"),
    Pattern("p2p", "point to point", r"point_to_point_pyobj", r".*"),
    Pattern("p2p", "recv", r"recv|_recv_.*|_exec_recv_\w+", r"deepspeed/runtime/pipe/.*"),
    Pattern("p2p", "send", r"send|_send_.*|_exec_send_\w+", r"deepspeed/runtime/pipe/.*"),
    Pattern(
        "store", "store",
        r"barrier|get_all|synchronize|_barrier_nonblocking",
        r"torch/distributed/elastic/utils/store.py",
    ),
    Pattern(
        "store", "rendezvous",
        r"_create_c10d_store|_tcp_rendezvous_handler|_env_rendezvous_handler|rendezvous|_store_based_barrier|"
        r"next_rendezvous",
        r"torch/distributed/.*",
    ),
    Pattern(
        "store", "new_group",
        r"new_group|new_subgroups.*|_new_group_with_tag|_new_process_group_helper|split_group",
        C10D,
    ),
    Pattern(
        "destroy", "destroy_process_group",
        r"_?destroy_process_group|_?abort_process_group|_shutdown_backend|destroy_model_parallel",
        r".*",
    ),
    Pattern("store", "init_process_group", r"init_process_group", C10D),
    Pattern(
        "store", "wait",
        r"wait|get|check|wait_for_workers|_store_get",
        r"torch/distributed/(rpc|elastic)/.*store.*",
    ),
    Pattern(
        "data", "DataLoader",
        r"_next_data|_try_get_data|_get_data|_try_put_index|_process_data",
        r"torch(data)?/.*(dataloader|data_loader).*\.py",
    ),
    Pattern("data", "DataLoader", r"fetch", r"torch/utils/data/_utils/fetch.py"),
    Pattern(
        "data", "DataLoader",
        r"__next__|_next_data",
        r"torchdata/.*|webdataset/.*|nvidia/dali/.*|torch/utils/data/.*",
    ),
    Pattern(
        "join", "workers",
        r"_shutdown_workers|__del__",
        r"torch(data)?/.*(dataloader|data_loader).*\.py",
    ),
    Pattern(
        "checkpoint", "checkpoint",
        r"save|async_save|load|save_state_dict|load_state_dict|write_data|read_data|_write_item|"
        r"_split_by_size_and_type|finish|_write_files_from_queue|save_file|load_file|_save|_legacy_save|_load|"
        r"storage_copy",
        r"torch/distributed/checkpoint/.*|torch/serialization.py|safetensors/.*|"
        r"megatron/.*dist_checkpointing/.*|deepspeed/runtime/checkpoint_engine/.*",
    ),
    Pattern(
        "checkpoint", "async checkpoint",
        r"maybe_finalize_async_calls|maybe_finalize_async_save|is_current_async_call_done|execute_save|"
        r"async_save|wait_for_staging|synchronize_staging",
        r".*",
    ),
    Pattern("data", "dataset map", r"iflatmap_unordered", r"datasets/.*"),
    Pattern("file_lock", "file lock", r"wait", r".*file_baton.py"),
    Pattern(
        "file_lock", "file lock",
        r"acquire|_acquire|lock|__enter__",
        r"filelock/.*|portalocker/.*|fasteners/.*",
    ),
    Pattern("rpc", "ray.get", r"get|wait|get_objects|fetch_and_register.*", r"ray/(_private/.*|worker.py)"),
    Pattern("rpc", "rpc", r"rpc_sync|wait_all|_wait_all|_all_gather", r"torch/distributed/rpc/.*"),
    Pattern("rpc", "gRPC", r".*", r"grpc/.*"),
    Pattern(
        "http", "HTTP",
        r".*",
        r"(urllib3|requests|httpx|httpcore|aiohttp|openai|anthropic)/.*|http/client.py|urllib/request.py",
    ),
    Pattern(
        "http", "storage",
        r".*",
        r"(boto3|botocore|s3transfer|s3fs|gcsfs|fsspec|adlfs|huggingface_hub|google/cloud|google/api_core|"
        r"azure)/.*",
    ),
    Pattern("http", "service", r".*", r"(wandb|mlflow|redis|pymongo|psycopg2?|comet_ml|swanlab)/.*"),
    Pattern(
        "compile", "compile",
        r".*",
        r"torch/_dynamo/.*|torch/_inductor/.*|triton/.*|torch/utils/cpp_extension.py|tilelang/.*|deep_gemm/.*",
    ),
    Pattern(
        "lock", IMPORT_LOCK,
        r"acquire|__enter__|_lock_unlock_module|_get_module_lock",
        r"<frozen importlib._bootstrap>|importlib/_bootstrap.py",
    ),
    Pattern(
        "import", "import",
        r"_find_and_load.*|_load_unlocked|exec_module|_call_with_frames_removed|_path_stat|get_data",
        r"<frozen importlib.*|importlib/_bootstrap.*",
    ),
    Pattern(
        "load", "model load",
        r"from_pretrained|_load_pretrained_model|load_state_dict|load_weights|get_model|safe_open",
        r"transformers/.*|diffusers/.*|vllm/.*|sglang/.*",
    ),
    Pattern(
        "prompt", "debugger",
        r"interaction|cmdloop|set_trace|post_mortem|_cmdloop|interact|mainloop|embed|user_line|raw_input",
        r"pdb.py|bdb.py|cmd.py|code.py|ipdb/.*|IPython/.*|pudb/.*|debugpy/.*|rpdb/.*",
    ),
    Pattern(
        "idle", ENGINE_LOOP,
        r"_process_input_queue|recv_requests|recv_from_tokenizer|handle_loop|serve|run_until_shutdown",
        r"(sglang|vllm|uvicorn|starlette)/.*",
    ),
    Pattern("idle", WORKER_LOOP, r"main_loop|run_task_loop|_get_next_task\w*", r"ray/(_private/)?worker.py"),
    Pattern("launcher", "launcher", r"_invoke_run|_monitor_workers|launch_agent", r"torch/distributed/.*"),
    Pattern("launcher", "launcher", r"join|start_processes", r"torch/multiprocessing/spawn.py"),
    Pattern("launcher", "launcher", r"main|launch\w*|monitor\w*", r"deepspeed/launcher/.*"),
    Pattern("launcher", "launcher", r"\w*launcher|launch_command", r"accelerate/(commands/launch|launchers).py"),
    Pattern("launcher", "launcher", r"launch", r"(pytorch_)?lightning\w*/.*launchers/.*"),
    Pattern("launcher", "launcher", r"wait_for_completion_or_failure|wait_for_engine_startup", r"vllm/.*"),
    Pattern("sleep", "retry", r".*", r"(tenacity|backoff|retrying)/.*"),
    Pattern("sleep", "retry", r".*", r"retrying.py"),
)
GENERIC = (
    Pattern(
        "subprocess", "subprocess",
        r"wait|_wait|communicate|_communicate|_try_wait|run|check_output|check_call",
        r"subprocess.py",
    ),
    Pattern("join", "process join", r"join|wait|poll", r"multiprocess(ing)?/(process|popen_.*).py"),
    Pattern("join", "pool join", r"join|_terminate_pool|_help_stuff_finish", r"multiprocess(ing)?/pool.py"),
    Pattern("future", "pool result", r"get|wait|next", r"multiprocess(ing)?/pool.py"),
    Pattern(
        "future", "future",
        r"result|wait|as_completed|exception|result_iterator|_result_or_cancel",
        r"concurrent/futures/.*",
    ),
    Pattern(
        "join", "executor shutdown",
        r"shutdown|join_executor_internals|_python_exit",
        r"concurrent/futures/.*",
    ),
    Pattern(
        "queue", "multiprocessing queue",
        r"get|put|_recv|recv|recv_bytes|_recv_bytes|poll|_poll|wait|accept",
        r"multiprocess(ing)?/(queues|connection|managers).py",
    ),
    Pattern("queue", "queue", r"get|put|join", r"queue.py"),
    Pattern(
        "join", "thread join",
        r"join|_join_os_thread|_wait_for_tstate_lock|_shutdown",
        r"threading.py",
    ),
    Pattern(
        "lock", "lock",
        r"acquire|__enter__|_acquire_restore",
        r"threading.py|multiprocess(ing)?/synchronize.py|tqdm/std.py",
    ),
    Pattern(
        "lock", "logging's lock",
        r"acquire|_acquireLock|flush|_flush_std_streams",
        r"logging/__init__.py|multiprocess(ing)?/util.py",
    ),
    Pattern("lock", "lock", r"_?acquire(_lock)?|wait_for_lock|lock_acquire", r".*"),
    Pattern("event", "event", r"wait|wait_for|_wait", r"threading.py|multiprocess(ing)?/synchronize.py"),
    Pattern(
        "queue", "message",
        r"recv|recv_multipart|recv_pyobj|recv_json|recv_string|send|send_multipart|poll",
        r"zmq/.*",
    ),
    Pattern(
        "idle", EVENT_LOOP,
        r"run_forever|run_until_complete|_run_once|run|select|poll",
        r"asyncio/.*|selectors.py|uvloop/.*",
    ),
    Pattern(
        "socket", "socket",
        r"readinto|recv|recv_into|recvfrom|read|accept|connect|create_connection|sendall|do_handshake|"
        r"getaddrinfo",
        r"socket.py|ssl.py|_socket.*",
    ),
    Pattern(
        "device", "device sync",
        r"synchronize|wait_event|wait_stream|current_stream|item|tolist|cpu|elapsed_time|query|empty_cache",
        r"torch/(cuda|npu|xpu|hip|accelerator|_tensor).*",
    ),
    Pattern("device", "device sync", r"(stream_|device_)?synchronize", r".*"),
    Pattern("sleep", "sleep", r"_?(time_)?sleep", r".*"),
    Pattern(
        "device", "device sync",
        r"clip_grad_norm_|clip_grads_with_norm_|_clip_grads_with_norm_|_get_total_norm|get_total_norm|"
        r"unscale_|_unscale_grads_|_maybe_opt_step|_is_any_true",
        r"torch/.*",
    ),
    Pattern(
        "backward", "backward",
        r"_engine_run_backward|backward|grad",
        r"torch/autograd/.*|torch/_tensor.py",
    ),
)
# fmt: on
