"""The phase of the job in which a frame is (cleanup, init, checkpoint, data, error, engine), and
its parallel dimension.

`USER` as a file means: not in a library.
"""

# fmt: off
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
        r"_?(tear_?down|clean_?up|shut_?down|destroy|finali[sz]e|close|on_exit|atexit|dispose|__exit__|__del__|__aexit__)"
        r"(_(all|dist\w*|engines?|process\w*|workers?|train\w*|job|run|servers?|resources?|everything|groups?|parallel\w*|"
        r"loaders?|writers?|threads?|pools?|and_\w+))?|\w+_(clean_?up|tear_?down|shut_?down)|"
        r"stop_\w*(workers?|engines?|servers?|threads?|writers?)",
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
    # Activation checkpointing only shares the name.
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
    # Requests to services outside the job for samples or rewards: a poll there is no error path.
    (
        "outside",
        r"_?\w*(rollout|generat|trajector|infer(ence|_)|reward|verif|judge|grade)\w*|prepare_batch|"
        r"_?wait_(for_)?(server|engine|results?|samples?|response|health)\w*",
        r"USER",
    ),
    (
        "engine",
        r"event_loop.*|run_busy_loop|worker_busy_loop|_process_input_queue|run_scheduler_process|"
        r"run_engine_core|run_worker.*",
        r"(sglang|vllm)/.*",
    ),
)
# The parallel dimension of a library's collective: different ones may be different groups.
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
