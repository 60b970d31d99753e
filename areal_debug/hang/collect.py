"""`areal-debug hang` and `hang collect`: collect the stacks of ranks, to diagnose now or later."""

import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import click

from areal_core.safety.durable import commit_file
from areal_core.safety.scratch import unfinished_folder
from areal_debug.cli import Verb, force_option, json_option
from areal_debug.render import announce, count, is_quiet, print_json, refuse_existing
from hangdoctor.collect.discover import Search
from hangdoctor.collect.host import collect_host
from hangdoctor.collect.pyspy import Options
from hangdoctor.collect.write import Manifest, pack
from hangdoctor.errors import HangInputError

TAR_ENDINGS = (".tar.gz", ".tgz")
LOOKS = 5


@click.command(
    cls=Verb,
    short_help="Write the stacks of every rank into a folder or tar file",
    example="areal-debug hang collect --to stacks.tar.gz --slurm 4711",
)
@click.option("--to", type=click.Path(path_type=Path), required=True, help="New folder, or .tar.gz file.")
@force_option
@click.option("--pid", "pids", type=int, multiple=True, help="A rank or a launcher; may be repeated.")
@click.option("--match", default="", help="Regular expression that the ranks' command lines match.")
@click.option(
    "--samples",
    default=2,
    show_default=True,
    type=click.IntRange(1, 10),
    help="Number of stack dumps per process.",
)
@click.option("--interval", default=3.0, show_default=True, help="Seconds between two dumps.")
@click.option("--timeout", default=10.0, show_default=True, help="Seconds that one dump may take.")
@click.option(
    "--native", is_flag=True, help="Dump C and C++ frames in a second pass; pauses each process briefly."
)
@click.option("--slurm", metavar="JOB", help="Every node of this SLURM job, in a step of its own.")
@click.option(
    "--ray",
    "ray_address",
    metavar="ADDRESS",
    is_flag=False,
    flag_value="auto",
    help="Every node of a Ray cluster.",
)
@click.option("--ssh", metavar="HOSTS", help="These hosts, separated by commas.")
@click.option(
    "--k8s",
    metavar="SELECTOR",
    help="Every running pod with this label selector; prints each kubectl command.",
)
@click.option("--namespace", default="", help="Namespace of the pods.")
@click.option("--python", default="python3", show_default=True, help="Python on the hosts, 3.11 or newer.")
@json_option
def collect(
    to: Path,
    force: bool,
    pids: tuple[int, ...],
    match: str,
    samples: int,
    interval: float,
    timeout: float,
    native: bool,
    slurm: str | None,
    ray_address: str | None,
    ssh: str | None,
    k8s: str | None,
    namespace: str,
    python: str,
    as_json: bool,
) -> None:
    """Dump the stacks and system facts of every rank, for `areal-debug hang diagnose`.

    Without --pid or --match: every process of yours with a RANK in its environment. The job needs
    no preparation; py-spy is needed on this host only and is sent to the others.
    """
    if sum(bool(way) for way in (slurm, ray_address, ssh, k8s)) > 1:
        raise click.UsageError("--slurm, --ray, --ssh and --k8s exclude each other: give one.")
    search = Search(pids, match, ("SLURM_JOB_ID", slurm) if slurm else None)
    options = Options(samples, interval, timeout, native)

    def gather(folder: Path) -> Manifest:
        if ray_address:
            from hangdoctor.collect.ray_nodes import collect_ray

            return collect_ray(ray_address, search, folder, options)
        if way := _way_to_hosts(slurm, ssh, k8s, namespace):
            from hangdoctor.collect.remote import collect_hosts

            return collect_hosts(*way, search, folder, options, python, all_queried=ssh is None)
        return collect_host(search, folder, options)

    announce("reading the stacks of all ranks")
    manifest = _into(to, gather, force)
    if as_json:
        print_json({"collection": str(to), **asdict(manifest)})
    else:
        lines = _summary(manifest, to)
        click.echo(lines[-1] if is_quiet() else "\n".join(lines))


def live(search: Search, as_json: bool) -> int:
    """Collect this host, diagnose, print; return the exit code of `hang diagnose`.

    Where ranks have come to their waits since the sample before, look again: twice in motion is a
    job that moves, and one that has just hung stands still in the next samples.

    Raises HangInputError if there are no ranks.
    """
    from areal_debug.hang.render import show_diagnosis
    from hangdoctor.diagnose import diagnose, unsettled
    from hangdoctor.parse.read import read_snapshot

    options = Options()
    announce(f"reading the stacks of all ranks, {options.num_samples} times")
    for again in range(LOOKS):
        with tempfile.TemporaryDirectory(prefix="hangdoctor-") as folder:
            manifest = collect_host(search, Path(folder), options)
            snapshot = read_snapshot([Path(folder)])
        if search == Search():
            snapshot = replace(snapshot, notes=(_taken(manifest), *snapshot.notes))
        diagnosis = diagnose(snapshot)
        moves = diagnosis.label == "straggler_or_not_hung"
        is_open = unsettled(snapshot) or (diagnosis.label == "unknown" and len(snapshot.dumps) > 0)
        if not is_open or (again and moves):
            break
        limit_s = (LOOKS - 1) * options.interval_s
        announce(f"these stacks do not show whether the job moves: looking again, for up to {limit_s:g} s")
    return show_diagnosis(diagnosis, snapshot, as_json)


def _taken(manifest: Manifest) -> str:
    """Return which job was read where nobody named one, and why this one."""
    pids = [str(process.pid) for process in manifest.processes if process.rank is not None]
    return f"read pid {', '.join(pids[:4])}: the only job of this user with RANK in its environment; --pid reads another"


def _way_to_hosts(
    slurm: str | None, ssh: str | None, k8s: str | None, namespace: str
) -> tuple[list[str], Callable[[str, list[str]], list[str]]] | None:
    """Return the hosts and a function that wraps the collector's command for one.

    None for this host.
    """
    from hangdoctor.collect import remote

    if slurm:
        return remote.slurm_hosts(slurm), partial(remote.slurm_command, slurm)
    if ssh:
        return [host.strip() for host in ssh.split(",") if host.strip()], remote.ssh_command
    if k8s:
        return remote.kubernetes_pods(k8s, namespace), partial(_kubectl, namespace)
    return None


def _kubectl(namespace: str, pod: str, collector: list[str]) -> list[str]:
    from hangdoctor.collect.remote import kubernetes_command

    command = kubernetes_command(namespace, pod, collector)
    start = command[: -len(collector)]
    click.echo(" ".join([*start, collector[0], "-c COLLECTOR", *collector[3:]]), err=True)
    return command


def _into(to: Path, gather: Callable[[Path], Manifest], force: bool) -> Manifest:
    """Gather into a new folder, or into a tar through a temporary one; leave nothing incomplete."""
    refuse_existing(to, force)
    if to.is_dir() and any(to.iterdir()) and not (to / "collection.json").exists():
        raise HangInputError(f"{to} is no collection, so --force does not replace it: give a new folder")
    if to.name.endswith(TAR_ENDINGS):
        with tempfile.TemporaryDirectory(prefix="hangdoctor-") as folder:
            manifest = gather(Path(folder))
            commit_file(to, pack(Path(folder)))
        return manifest
    with unfinished_folder(to) as folder:
        folder.mkdir()
        return gather(folder)


def _summary(manifest: Manifest, to: Path) -> list[str]:
    ranks = [process for process in manifest.processes if process.role not in ("child", "launcher")]
    dumped = sum(process.status == "dumped" for process in ranks)
    lines = [
        f"{process.name}: {process.status}: {process.detail}"
        for process in ranks
        if process.status != "dumped"
    ]
    if manifest.elsewhere:
        lines.append(
            f"{len(manifest.elsewhere)} ranks of hosts that were not queried or did not answer: not collected"
        )
    lines += [f"host {host.host}: {host.status}: {host.detail}" for host in manifest.hosts if host.detail]
    if manifest.num_masked:
        lines.append(f"masked, as they look like credentials: {count(manifest.num_masked, 'value')}")
    lines.append(f"{dumped} of {len(ranks)} ranks dumped into {to}. Next: areal-debug hang diagnose {to}")
    return lines
