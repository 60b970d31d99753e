"""Share one process that has torch and Transformers imported between commands.

AREAL_DEBUG_WARM_MIN=30: the first command that replays starts `warm_server.py`, later ones connect.

    key      everything that a process inherits: variables, limits, cores, namespaces, cgroup
    KEY.sock address of the process, in a folder that only its user can read
    KEY.lock locked by who connects or starts, and by a process that ends
    KEY.log  its output

So a command gets a process that is the one it would have started. It has imported nothing of ours.
"""

import hashlib
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from areal_core.errors import ConfigError
from areal_core.launch import warm_server
from areal_core.launch.processes import MARKS
from areal_core.safety.private import default_root, make_private

VARIABLE = "AREAL_DEBUG_WARM_MIN"
LIBRARIES = (
    "accelerate",
    "aiohttp",
    "omegaconf",
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.utils.tensorboard",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.tokenization_utils_tokenizers",
)
NUM_LIMITS = 16  # <asm-generic/resource.h>
# Variables of a terminal, a test, and ours: no library that is imported reads them.
UNREAD = ("_", "COLUMNS", "LINES", "FORCE_COLOR", "OLDPWD", "PWD", "SHLVL", "TERM", "WINDOWID")
UNREAD_PREFIXES = ("AREAL_", "_AREAL_", "PYTEST_", "SSH_", "TMUX", "XDG_SESSION_")


def kept_minutes() -> float | None:
    """Return after how many unused minutes the process ends; None if none is to be kept.

    Raises ConfigError for another value than a positive number, and where there is no Linux.
    """
    text = os.environ.get(VARIABLE, "")
    if not text:
        return None
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < float("inf"):
        raise ConfigError(f"{VARIABLE}={text!r} must be a number of minutes above 0, such as 30, or unset")
    if sys.platform != "linux":
        raise ConfigError(f"{VARIABLE} needs Linux, and this is {sys.platform}: unset it")
    return minutes


def connect(command: Sequence[str], env: Mapping[str, str], minutes: float) -> socket.socket:
    """Return a connection to the process of this user, environment and Python; start it if needed.

    Args:
        command: starts `warm_server.py`, without its argument.
        env: of the process, complete.
    """
    root = Path(default_root())
    make_private(root)
    make_private(folder := root / "warm")
    environment = {name: value for name, value in env.items() if name != MARKS}  # ends with no command
    if paths := environment.get("PYTHONPATH"):
        environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, paths.split(os.pathsep)))
    place = folder / key(command, environment)
    address = str(place.with_suffix(".sock"))
    with ExitStack() as stack, warm_server.locked(place.with_suffix(".lock")):
        channel = stack.enter_context(socket.socket(socket.AF_UNIX))
        try:
            channel.connect(address)
        except (FileNotFoundError, ConnectionRefusedError):  # it has ended, or was killed
            start(command, environment, place, minutes)
            channel.connect(address)
        stack.pop_all()
        return channel


def start(command: Sequence[str], env: Mapping[str, str], place: Path, minutes: float) -> None:
    """Start the process; it answers once it has imported the libraries."""
    address, lock, log = (place.with_suffix(suffix) for suffix in (".sock", ".lock", ".log"))
    address.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener, log.open("wb") as output:
        listener.bind(str(address))
        listener.listen(64)
        listening = listener.fileno()
        settings = {"listening": listening, "lock": str(lock), "modules": LIBRARIES, "idle_s": minutes * 60}
        subprocess.run(
            [*command, json.dumps(settings)],
            env=env,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=[listening],
            check=True,
        )


def key(command: Sequence[str], env: Mapping[str, str]) -> str:
    """Return a name for all that a process inherits from the one that starts it."""
    read = {
        name: value
        for name, value in env.items()
        if name not in UNREAD and not name.startswith(UNREAD_PREFIXES)
    }
    limits = [resource.getrlimit(kind) for kind in range(NUM_LIMITS)]
    namespaces = [os.readlink(entry) for entry in sorted(Path("/proc/self/ns").iterdir())]
    facts = [list(command), sorted(read.items()), limits, sorted(os.sched_getaffinity(0)), os.nice(0)]
    facts += [namespaces, Path("/proc/self/cgroup").read_text()]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]
