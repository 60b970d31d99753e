"""Collect every node of a Ray cluster with one task each, through the driver's own Ray. Imports ray
only when called.
"""

from pathlib import Path

from hangdoctor.collect.discover import Search
from hangdoctor.collect.pyspy import Options
from hangdoctor.collect.remote import Answer, build_bundle, collector_command, merge_answers, time_limit_s
from hangdoctor.collect.write import Manifest
from hangdoctor.errors import HostsUnknown

ACTORS_AND_TASKS = r"^ray::(?!IDLE)"
"""Process titles of Ray workers that are not idle."""


def collect_ray(address: str, search: Search, folder: Path, options: Options) -> Manifest:
    """Collect every living node of the cluster at `address` (`auto`: the one of this host) into
    `folder`.

    Ray Train sets RANK inside the running worker, where /proc cannot see it; such workers are
    numbered by pid.

    Raises:
        HostsUnknown: ray is not installed or no cluster responds.
        NoRanksFound: no node runs an actor or task.
    """
    try:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
    except ImportError:
        raise HostsUnknown(
            "ray is not installed in this Python: run this with the Python of the cluster"
        ) from None
    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, configure_logging=False)
        except ConnectionError as error:
            raise HostsUnknown(f"No Ray cluster at {address!r}: {error}") from None
    where = search if search != Search() else Search(match=ACTORS_AND_TASKS)
    bundle = ray.put(build_bundle())
    limit_s = time_limit_s(options)
    task = ray.remote(num_cpus=0, max_retries=0)(_run_collector)
    pending = {}
    for node in ray.nodes():
        if node["Alive"]:
            here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            host = node["NodeManagerHostname"]
            command = collector_command("python", where, options, host)[1:]
            pending[host] = task.options(scheduling_strategy=here).remote(command, bundle, limit_s)
    answers = []
    for host, reference in pending.items():
        try:
            answers.append(Answer(host, *ray.get(reference, timeout=limit_s + 30)))
        except (ray.exceptions.RayError, TimeoutError) as error:
            answers.append(Answer(host, None, b"", f"{type(error).__name__}: {error}"))
    return merge_answers(answers, folder, all_queried=True)


def _run_collector(arguments: list[str], bundle: bytes, limit_s: float) -> tuple[int, bytes, str]:
    """On the node, in a Ray worker: run the collector as a child process."""
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, *arguments], input=bundle, capture_output=True, timeout=limit_s, check=False
    )
    return done.returncode, done.stdout, done.stderr.decode(errors="replace")
