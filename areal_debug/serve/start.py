"""Build the specification of a server; refuse what cannot work before anything starts."""

import getpass
import importlib.util
import socket
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from areal_core.config import SGLangConfig
from areal_core.launch.processes import thread_limits
from areal_core.launch.server_process import free_port
from areal_core.launch.sglang_process import cpu_environment, server_args
from areal_core.servers.discovery import FolderNames
from areal_debug.installation import require
from areal_debug.serve.facts import stored_dtype
from areal_debug.serve.keeper import ServeSpec
from areal_debug.serve.state import known_servers


class CannotServe(ValueError):
    """The server cannot start: no such model, port in use, or engine not installed."""


def plan_server(
    *,
    model: str,
    engine: str,
    host: str,
    port: int,
    device: str,
    dtype: str,
    context_length: int | None,
    run: str | None,
    names_root: str,
    ready_timeout_s: float,
    arguments: list[str],
) -> ServeSpec:
    """Build the specification of a server. Raises `CannotServe`."""
    if engine == "sglang" and importlib.util.find_spec("sglang") is None:
        raise CannotServe("SGLang is not installed: pip install 'areal-debug[sglang]', or --backend embedded")
    require("transformers")
    model = checked_model(model)
    if device == "auto":  # known without loading torch: whether the NVIDIA driver lists a GPU
        device = "cuda" if any(Path("/proc/driver/nvidia/gpus").glob("*")) else "cpu"
    if dtype == "auto":  # the checkpoint's dtype; SGLang's "auto" would serve float32 as float16
        dtype = stored_dtype(model) or dtype
    embedded = ["--dtype", dtype] if dtype != "auto" else []
    if engine == "sglang":
        options = replace(SGLangConfig(), dtype=dtype, context_length=context_length, attention_backend=None)
        args, env = server_args(options, device), cpu_environment() if device == "cpu" else {}
    else:
        args, env = embedded, thread_limits(1)
        if context_length is not None:
            args = [*args, "--context-length", str(context_length)]
    return ServeSpec(
        model=model,
        engine=engine,
        host=host,
        port=checked_port(host, port) if port else free_port(host),
        args=[*args, *arguments],
        env=env,
        ready_timeout_s=ready_timeout_s,
        run="" if run is None else full_run_name(run, names_root),
        names_root=names_root,
    )


def checked_model(model: str, needs: str = "config.json") -> str:
    """Return the model's folder as an absolute path, or a hub name (`owner/name`) unchanged.

    `needs` is the file that the folder must have, if any.

    Raises:
        CannotServe: there is no such folder, or it is no checkpoint.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        if needs and not (folder / needs).is_file():
            raise CannotServe(f"{folder} has no {needs}: give a merged checkpoint in Hugging Face format")
        return str(folder.resolve())
    if folder.exists():
        raise CannotServe(f"{folder} is a file: give the folder that contains config.json and the weights")
    if model.startswith(("/", ".", "~")) or model.count("/") != 1 or folder.parent.is_dir():
        raise CannotServe(f"there is no model at {model}: give a checkpoint folder, or owner/name on the hub")
    return model


def checked_port(host: str, port: int) -> int:
    """Return the port if nothing listens there. Raises `CannotServe`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise CannotServe(
                f"cannot listen on {host}:{port} ({error.strerror}{holder_of(host, port)}): choose another --port, or "
                f"omit it"
            ) from error
    return port


def holder_of(host: str, port: int) -> str:
    """Describe the process that has the port, starting with ", "; empty if it is not known."""
    for state in known_servers():
        if state.address == f"{host}:{port}" and state.keeper_lives:
            return f", by our own server of {state.model}; `areal-debug serve --stop {state.address}` ends it"
    with suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            # Only root sees the pid of another user's process.
            if connection.status == "LISTEN" and connection.laddr.port == port and connection.pid:
                return f", by process {connection.pid} ({psutil.Process(connection.pid).name()})"
    return ""


def full_run_name(run: str, names_root: str) -> str:
    """Return `experiment/trial`; an omitted trial is found if only one has servers.

    Raises:
        CannotServe: the name is malformed, or the trial is ambiguous.
    """
    if run.count("/") == 1 and all(run.split("/")):
        return run
    if "/" in run or not run:
        raise CannotServe(f"--join {run!r}: give EXPERIMENT or EXPERIMENT/TRIAL")
    entries = FolderNames(names_root).below(f"{getpass.getuser()}/{run}")
    trials = sorted({name.split("/")[2] for name in entries})
    if len(trials) != 1:
        found = (
            f"has {len(trials)} trials with servers ({', '.join(trials)})" if trials else "has no servers yet"
        )
        raise CannotServe(f"experiment {run!r} {found} below {names_root}: give --join {run}/TRIAL")
    return f"{run}/{trials[0]}"
