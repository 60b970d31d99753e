"""The tables behind `hangdoctor.waits`: which function of which file waits for what, and what the job is
about there.

Names are the last part of a qualified name, files are below site-packages; both are regular expressions that
must match in full. `USER` as a file means: not in a library. A new framework is a new row here, never a new
branch in the code.
"""

import re
from dataclasses import dataclass

# Kinds that end only when other ranks come: a rank in one of them is a victim as long as somebody else is
# not.
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
    """One row: the last name of a function and the end of its file, as regular expressions."""

    kind: str
    operation: str
    function: str
    file: str


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
        r"broadcast_pyobj|broadcast_recv_input|point_to_point_pyobj",
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
        r"megatron/.*p2p_communication.py",
    ),
    Pattern("p2p", "recv", r"recv|_recv_.*", r"deepspeed/runtime/pipe/p2p.py"),
    Pattern("p2p", "send", r"send|_send_.*", r"deepspeed/runtime/pipe/p2p.py"),
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
    Pattern("destroy", "destroy_process_group", r"destroy_process_group|_abort_process_group", C10D),
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
    Pattern("file_lock", "file lock", r"wait", r".*file_baton.py"),
    Pattern(
        "file_lock", "file lock",
        r"acquire|_acquire|lock|__enter__",
        r"filelock/.*|portalocker/.*|fasteners/.*",
    ),
    Pattern("rpc", "ray.get", r"get|wait|get_objects|fetch_and_register.*", r"ray/_private/.*"),
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
        "idle", "engine loop",
        r"_process_input_queue|recv_requests|recv_from_tokenizer|handle_loop|serve|run_until_shutdown",
        r"(sglang|vllm|uvicorn|starlette)/.*",
    ),
    Pattern("launcher", "launcher", r"_invoke_run", r"torch/distributed/elastic/.*"),
    Pattern("sleep", "retry", r".*", r"(tenacity|backoff|retrying)/.*"),
    Pattern("sleep", "retry", r".*", r"retrying.py"),
)
GENERIC = (
    Pattern(
        "subprocess", "subprocess",
        r"wait|_wait|communicate|_communicate|_try_wait|run|check_output|check_call",
        r"subprocess.py",
    ),
    Pattern("join", "process join", r"join|wait|poll", r"multiprocessing/(process|popen_.*).py"),
    Pattern("join", "pool join", r"join|_terminate_pool|_help_stuff_finish", r"multiprocessing/pool.py"),
    Pattern("future", "pool result", r"get|wait|next", r"multiprocessing/pool.py"),
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
        r"multiprocessing/(queues|connection|managers).py",
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
        r"threading.py|multiprocessing/synchronize.py",
    ),
    Pattern("event", "event", r"wait|wait_for|_wait", r"threading.py|multiprocessing/synchronize.py"),
    Pattern(
        "queue", "message",
        r"recv|recv_multipart|recv_pyobj|recv_json|recv_string|send|send_multipart|poll",
        r"zmq/.*",
    ),
    Pattern(
        "idle", "event loop",
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
NATIVE = (
    Pattern("p2p", "recv", r"c10d::ProcessGroupGloo::RecvWork::wait|.*RecvWork.*", r".*"),
    Pattern("p2p", "send", r"c10d::ProcessGroupGloo::SendWork::wait|.*SendWork.*", r".*"),
    Pattern(
        "collective", "work.wait",
        r"c10d::Work::wait|c10d::(ops|ProcessGroup)[^(]*::(wait|synchronize).*|.*WorkNCCL::.*|"
        r"gloo::(?!transport|rendezvous).*|ncclGroupEnd.*|ncclAllReduce.*",
        r".*",
    ),
    Pattern(
        "store", "store",
        r"c10d::(TCPStore|FileStore|PrefixStore|HashStore|detail::TCPClient|.*Store::).*|gloo::rendezvous.*|"
        r"ncclCommInitRank.*|bootstrapInit.*",
        r".*",
    ),
    Pattern(
        "device", "device sync",
        r"(cuda|cu|hip)(Stream|Device|Event|Ctx)Synchronize.*|cudaMemcpy.*|cuMemcpy.*|"
        r"at::native::_local_scalar_dense.*|at::native::item.*",
        r".*",
    ),
    Pattern("backward", "backward", r"torch::autograd::Engine::.*", r".*"),
    Pattern("gil", "GIL", r"take_gil|PyEval_AcquireThread|PyEval_RestoreThread", r".*"),
    Pattern(
        "lock", "lock",
        r"(lock|rlock)_(PyThread_)?acquire.*|.*acquire_timed|PyMutex_Lock.*|_PyMutex.*",
        r".*",
    ),
    Pattern("file_lock", "file lock", r"flock|fcntl_flock.*|fcntl_lockf.*|lockf", r".*"),
    Pattern("sleep", "sleep", r"clock_nanosleep|time_sleep|nanosleep|pysleep", r".*"),
    Pattern("subprocess", "waitpid", r"wait4|waitpid|waitid|os_waitpid.*", r".*"),
    Pattern("prompt", "input", r"builtin_input.*|PyOS_Readline|readline.*", r".*"),
    Pattern(
        "socket", "socket",
        r"sock_recv.*|sock_accept.*|sock_connect.*|recv|recvfrom|accept4?|connect|SSL_read.*|__libc_recv|"
        r"__poll|poll|epoll_wait|select",
        r".*",
    ),
    Pattern(
        "file", "file",
        r"os_read.*|os_fsync.*|fsync|fdatasync|_io_FileIO_(read|write).*|os_write.*",
        r".*",
    ),
)
# A call into C leaves no Python frame: what the line of the program says, where the process sleeps in it.
SOURCE = (
    ("destroy", "destroy_process_group", r"\b(destroy_process_group|_abort_process_group)\("),
    ("sleep", "sleep", r"\bsleep\("),
    ("file_lock", "file lock", r"\b(flock|lockf)\("),
    ("lock", "lock", r"\bwith\b.*(lock|mutex|semaphore|condition|\bcv\b)|(lock|mutex|sem\w*)\.acquire\(|\.acquire\("),
    ("prompt", "input", r"\binput\(|breakpoint\(|set_trace\("),
    ("subprocess", "waitpid", r"\bos\.(system|wait\w*)\("),
    ("collective", "work.wait", r"\b\w*(work|handle|req|request|pending|future|fut|op|w|h|works?\[\w+\])\.wait\("),
    ("store", "store", r"\bstore\.\w+\(|TCPStore\("),
    ("socket", "socket", r"\.(recv\w*|accept|connect)\(|getaddrinfo\("),
    ("device", "device sync", r"\.(item|cpu|tolist|numpy|synchronize)\(|\bsynchronize\("),
    ("file", "file", r"\bopen\(|\.(open|read\w*|write\w*|readline\w*)\(|\bos\.(read|write|fsync)\("),
)
POSTED = re.compile(
    r"\b(i?recv|i?send|batch_isend_irecv)\b|\b(all_reduce|all_gather\w*|reduce_scatter\w*|broadcast|all_to_all\w*|barrier)\b"
)
# Where the stack shows nothing but a line of Python, the kernel still says in which call the main thread
# sleeps.
WCHAN = (
    ("sleep", r"hrtimer_nanosleep|do_nanosleep|common_nsleep.*"),
    ("subprocess", r"do_wait.*|kernel_wait.*"),
    ("queue", r"(anon_)?pipe_(read|write).*|eventfd_read"),
    (
        "socket",
        r".*poll.*|ep_.*|do_select|core_sys_select|inet_csk_accept|sk_wait_data|wait_woken|unix_stream.*|"
        r"skb_wait.*|tcp_.*",
    ),
    ("prompt", r"n_tty_read|tty_.*"),
    (
        "file",
        r"(nfs|rpc_wait|folio_wait|io_schedule|jbd2|fuse|request_wait|wait_on_page|xfs|ext4|lustre|ll_|cl_|wait_for_partner|fifo_open|pipe_wait).*",
    ),
    ("file_lock", r"(flock_lock|locks_lock|posix_lock).*"),
    ("stopped", r"do_signal_stop|ptrace_stop"),
)
PHASES = (
    (
        "cleanup",
        r"destroy_process_group|_shutdown|_exit_function|_run_finalizers|_run_exitfuncs|_python_exit|"
        r"_cleanup_process_groups",
        r"torch/distributed/.*|threading.py|multiprocessing/util.py|concurrent/futures/.*|<frozen.*|weakref.py",
    ),
    ("cleanup", r"shutdown|__exit__|_terminate_pool|terminate", r"concurrent/futures/.*|multiprocessing/pool.py"),
    ("cleanup", r"_shutdown_workers|_clean_up_worker", r"torch(data)?/.*"),
    (
        "cleanup",
        r"_?(tear_?down|clean_?up|shut_?down|destroy|finali[sz]e|close|on_exit|atexit|dispose|__exit__|"
        r"__del__|__aexit__)(_\w+)?|\w+_(clean_?up|tear_?down|shut_?down)|stop_\w*(workers?|engines?|servers?|"
        r"threads?|writers?)",
        r"USER",
    ),
    (
        "cleanup",
        r"finish|end_training|teardown|_teardown|strategy_teardown",
        r"(wandb|accelerate|lightning|pytorch_lightning)/.*",
    ),
    (
        "init",
        r"init_process_group|_store_based_barrier|rendezvous|_tcp_rendezvous_handler|next_rendezvous|"
        r"new_group|new_subgroups.*|_new_group_with_tag|_new_process_group_helper|split_group|"
        r"init_device_mesh|_init_device_mesh|_init_process_groups|_get_or_create_default_group",
        r"torch/distributed/.*",
    ),
    (
        "init",
        r"initialize_model_parallel|init_distributed|init_torch_distributed|init_distributed_environment|"
        r"initialize_megatron|_initialize_distributed|setup_distributed|_sync_module_states|"
        r"_sync_params_and_buffers|_verify_param_shape_across_processes|_ddp_init_helper",
        r".*",
    ),
    ("init", r"_find_and_load.*", r"<frozen importlib.*|importlib/_bootstrap.*"),
    (
        "init",
        r"_?(init|initiali[sz]e|setup|build|create|construct)_?(distributed|dist|model|engine|process_groups?|"
        r"groups?|parallel|trainer|worker|mesh|env)\w*|load_model\w*|build_\w*model\w*",
        r"USER",
    ),
    ("init", r"__init__", r"torch/nn/parallel/distributed.py|torch/distributed/fsdp/.*"),
    (
        "checkpoint",
        r".*",
        r"torch/distributed/checkpoint/.*|torch/serialization.py|safetensors/.*|"
        r"megatron/.*dist_checkpointing/.*|deepspeed/runtime/checkpoint_engine/.*",
    ),
    # Activation checkpointing only shares the word.
    (
        "checkpoint",
        r"(?!.*(forward|gradient|grad_|activation|layer|block|sequential|wrap|function))\w*(checkpoint|ckpt)\w*",
        r"USER",
    ),
    (
        "checkpoint",
        r"save_pretrained|save_state|_?save_model\w*|async_save|maybe_finalize_async\w*|save_hf\w*|"
        r"_?(save|load)_?\w*(checkpoint|ckpt)\w*|_save_and_\w+",
        r"(?!torch/utils/checkpoint).*",
    ),
    ("data", r".*", r"torch/utils/data/.*|torchdata/.*|webdataset/.*|nvidia/dali/.*"),
    (
        "data",
        r"_?(get|next|load|fetch|prefetch|read)_?(batch|data|sample|minibatch|microbatch)\w*|_?next_batch|"
        r"data_?iter\w*",
        r"USER",
    ),
    (
        "error",
        r"\w*(handle|on|report|recover|catch)\w*_(error|exception|failure|oom|crash|fault|nan)\w*|\w*(error|"
        r"exception|failure)_(handler|handling|loop|recovery)\w*|excepthook\w*|recover\w*|\w*retry\w*|"
        r"\w*_on_(error|failure|exception)|rollback\w*|wait_for_(recovery|debugger|restart|admin)\w*|"
        r"\w*after_(error|failure|exception|crash|oom)\w*|post_mortem\w*|panic\w*|except_\w*|quarantine\w*",
        r"USER",
    ),
    (
        "error",
        r".*",
        r"(tenacity|backoff|retrying)/.*|retrying.py|pdb.py|bdb.py|code.py|traceback.py|ipdb/.*|pudb/.*|"
        r"debugpy/.*|rpdb/.*",
    ),
    (
        "engine",
        r"event_loop.*|run_busy_loop|worker_busy_loop|_process_input_queue|run_scheduler_process|"
        r"run_engine_core|run_worker.*",
        r"(sglang|vllm)/.*",
    ),
)
# Which parallel dimension a library's collective belongs to: two waits in different ones need not be the same
# group.
DOMAINS = (
    ("pipeline", r"megatron/.*pipeline.*|deepspeed/runtime/pipe/.*|torch/distributed/pipelining/.*"),
    ("expert", r".*(moe|expert|token_dispatcher|deep_ep).*"),
    (
        "tensor",
        r"megatron/.*tensor_parallel/.*|.*(parallel_state|tensor_parallel|tensor/parallel|sequence_parallel|"
        r"vocab_parallel).*",
    ),
    ("context", r".*(context_parallel|ring_attention|ulysses).*"),
    ("sharded data", r"torch/distributed/.*fsdp/.*|deepspeed/runtime/zero/.*"),
    (
        "data",
        r"torch/nn/parallel/distributed.py|megatron/.*distributed/.*|.*(distributed_data_parallel|"
        r"param_and_grad_buffer|distrib_optimizer).*",
    ),
)
# fmt: on
