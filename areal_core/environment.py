"""Environment variables: of servers, and those that libraries read as a process starts."""

ADDRESSES_VARIABLE = "AREAL_LLM_SERVER_ADDRS"  # host:port,host:port
# Ring and Simple: the summation order of NCCL's tree depends on topology.
DETERMINISTIC = {
    "PYTHONHASHSEED": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_NVLS_ENABLE": "0",
    "FLASH_ATTENTION_DETERMINISTIC": "1",
}
DETERMINISTIC_ON_CPU = {"PYTHONHASHSEED": "0"}  # the others are read by libraries of GPUs

# paths, separated as those of PATH, from which replays may import the user's own code
ALLOWED_CODE = "AREAL_DEBUG_CODE"
