"""Collect many hosts into one folder: each gets the collector through its stdin and streams its
collection back.

    bundle (this package and py-spy, a few MB) ──stdin──> python3 -c BOOTSTRAP on the host
    one thread a host, a time-out each           <─stdout── tar.gz of its collection
    all answers ──merge──> folder, with a status for every host and every expected rank

The hosts need nothing but Python 3.11; nothing is left on them.
"""

import io
import re
import shlex
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from areal_core.safety.printable import printable
from areal_core.safety.secrets import masker
from hangdoctor.collect.__main__ import NOTHING_TO_COLLECT, arguments_for
from hangdoctor.collect.discover import Search
from hangdoctor.collect.pyspy import Options, find_pyspy
from hangdoctor.collect.write import HostEntry, Manifest, merge, unpack
from hangdoctor.errors import HostsUnknown, NoRanksFound

BOOTSTRAP = """
import sys
sys.path[:] = filter(None, sys.path)  # not from the current folder
import io, os, shutil, tarfile, tempfile
if sys.version_info < (3, 11):
    sys.exit("hangdoctor needs Python 3.11 here, this is " + sys.version.split()[0] + "; name another with --python")
folder = tempfile.mkdtemp(prefix="hangdoctor-")
try:
    tarfile.open(fileobj=io.BytesIO(sys.stdin.buffer.read()), mode="r:gz").extractall(folder)
    sys.path.insert(0, folder)
    os.environ["PATH"] = os.environ.get("PATH", os.defpath) + os.pathsep + folder
    from hangdoctor.collect.__main__ import main
    sys.exit(main(sys.argv[1:]))
finally:
    shutil.rmtree(folder)
"""
HOST = re.compile(r"[\w\[][^\s\x00-\x1f]*")  # a name that begins with a dash would be an option
HOSTS_AT_ONCE = 64
START_S = 60.0
REFUSED_WORDS = ("permission denied", "not authorized", "forbidden")


@dataclass(frozen=True, slots=True)
class Answer:
    """The response of a host. `returncode` is None when it did not respond in time."""

    host: str
    returncode: int | None
    stdout: bytes
    stderr: str


def build_bundle() -> bytes:
    """Return the collector, what it imports and py-spy as a gzipped tar, a folder a package."""
    package = Path(__file__).parents[1]
    shared = package.parent / "areal_core"
    sources = [package / "__init__.py", package / "errors.py", package / "model.py"]
    sources += [*sorted((package / "collect").glob("*.py"))]
    sources += [shared / "__init__.py", *sorted((shared / "safety").glob("*.py"))]
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as tar:
        for source in sources:
            tar.add(source, arcname=str(source.relative_to(package.parent)))
        tar.add(find_pyspy(), arcname="py-spy")
    return packed.getvalue()


def collector_command(python: str, search: Search, options: Options, host: str) -> list[str]:
    return [python, "-c", BOOTSTRAP, *arguments_for(search, options), f"--host={host}"]


def slurm_hosts(job: str) -> list[str]:
    """Return the nodes of a running SLURM job.

    Raises:
        HostsUnknown: squeue does not know the job, or it has no nodes yet.
    """
    nodes = _query_scheduler(["squeue", "--noheader", f"--jobs={job}", "--format=%N"], f"SLURM job {job}")
    return _query_scheduler(["scontrol", "show", "hostnames", nodes], f"the nodes of SLURM job {job}").split()


def slurm_command(job: str, host: str, collector: list[str]) -> list[str]:
    """Return srun next to the job's own step: --overlap and no GPUs, else it would wait for the job
    indefinitely.
    """
    return [
        "srun",
        "--overlap",
        f"--jobid={job}",
        f"--nodelist={host}",
        "--nodes=1",
        "--ntasks=1",
        "--gres=none",
        *collector,
    ]


def ssh_command(host: str, collector: list[str]) -> list[str]:
    """Return ssh without prompts; the remote shell parses one string."""
    return ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "--", host, shlex.join(collector)]


def kubernetes_pods(selector: str, namespace: str) -> list[str]:
    """Return the running pods that a label selector matches.

    Raises:
        HostsUnknown: kubectl fails, or no pod matches.
    """
    command = [
        "kubectl",
        "get",
        "pods",
        f"--selector={selector}",
        "--field-selector=status.phase=Running",
        "--output=name",
    ]
    found = _query_scheduler([*command, *_namespace(namespace)], f"running pods with {selector!r}")
    return [name.removeprefix("pod/") for name in found.split()]


def kubernetes_command(namespace: str, pod: str, collector: list[str]) -> list[str]:
    """Return kubectl exec with the bundle on stdin."""
    return ["kubectl", "exec", "--stdin", pod, *_namespace(namespace), "--", *collector]


def _namespace(namespace: str) -> list[str]:
    return [f"--namespace={namespace}"] if namespace else []


def _query_scheduler(command: list[str], what: str) -> str:
    """Return the output of a scheduler's command, which must not be empty."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        raise HostsUnknown(f"{command[0]} is not on PATH here: run this where {command[0]} works") from None
    if done.returncode or not done.stdout.strip():
        reason = done.stderr.strip() or "nothing found"
        raise HostsUnknown(f"`{shlex.join(command)}` found no {what}: {reason}")
    return done.stdout.strip()


def query_hosts(commands: dict[str, list[str]], timeout_s: float) -> Iterator[Answer]:
    """Run one command per host, the bundle on its stdin, many at once; answers come in the order of
    the hosts.
    """
    bundle = build_bundle()

    def query(item: tuple[str, list[str]]) -> Answer:
        host, command = item
        try:
            done = subprocess.run(command, input=bundle, capture_output=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            return Answer(host, None, b"", f"no answer in {timeout_s:g} s")
        except FileNotFoundError:
            return Answer(host, 127, b"", f"{command[0]} is not on PATH here")
        return Answer(host, done.returncode, done.stdout, done.stderr.decode(errors="replace"))

    with ThreadPoolExecutor(HOSTS_AT_ONCE) as pool:
        yield from pool.map(query, commands.items())


def merge_answers(answers: Iterable[Answer], folder: Path, all_queried: bool) -> Manifest:
    """Merge all collections into `folder`, each as its answer comes, so that few of them are in
    memory.

    Raises:
        NoRanksFound: no host had a rank; the text gives the answer of each.
    """
    parts, others = [], []
    with tempfile.TemporaryDirectory(prefix="hangdoctor-", dir=folder) as scratch:
        for index, answer in enumerate(answers):
            part = Path(scratch, str(index))
            problem = _unpack_answer(answer, part)
            if problem is None:
                parts.append(part)
            else:
                others.append(problem)
        if not parts:
            answered = "\n".join(f"  {host.host}: {host.status}: {host.detail}" for host in others)
            raise NoRanksFound(f"No rank was collected from {len(others)} hosts:\n{answered}")
        return merge(parts, others, folder, all_queried)


def _unpack_answer(answer: Answer, part: Path) -> HostEntry | None:
    """Unpack the collection into `part` and return None, or return the reason why there is none."""
    if answer.returncode == 0:
        try:
            unpack(answer.stdout, part)
        except ValueError as error:
            return HostEntry(answer.host, "unreachable", str(error))
        return None
    reason = (
        answer.stderr.strip().splitlines()[-1] if answer.stderr.strip() else f"exit code {answer.returncode}"
    )
    if answer.returncode is None:
        return HostEntry(answer.host, "timed_out", reason)
    if answer.returncode == NOTHING_TO_COLLECT:
        return HostEntry(answer.host, "ok", answer.stderr.strip())
    reason = masker().text(reason)
    refused = any(words in answer.stderr.lower() for words in REFUSED_WORDS)
    return HostEntry(answer.host, "not_permitted" if refused else "unreachable", reason)


def collect_hosts(
    hosts: list[str],
    command_for: Callable[[str, list[str]], list[str]],
    search: Search,
    folder: Path,
    options: Options,
    python: str,
    all_queried: bool,
) -> Manifest:
    """Collect every host by the command that `command_for(host, collector)` returns, into one
    folder.

    `all_queried` states that the job has no other hosts.

    Raises:
        HostsUnknown: a host name is not valid.
        NoRanksFound: no host had a rank.
    """
    for host in hosts:
        if not HOST.fullmatch(host):
            raise HostsUnknown(
                f"the host name {printable(host, 100)!r} is not valid: give names or addresses of hosts"
            )
    commands = {host: command_for(host, collector_command(python, search, options, host)) for host in hosts}
    return merge_answers(query_hosts(commands, time_limit_s(options)), folder, all_queried)


def time_limit_s(options: Options) -> float:
    """Return the seconds one host may take: its samples, a slow start and a slow network."""
    return START_S + options.num_samples * (options.interval_s + 4 * options.timeout_s)
