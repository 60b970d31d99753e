"""The machines that a job needs, and their assignment to ranks and servers."""

from dataclasses import dataclass

from areal_core.errors import ConfigError
from areal_core.launch.job import Job


@dataclass(frozen=True)
class Placement:
    """Machines numbered from 0: those of the trainer first, then those that only serve.

    `server_nodes` is the machine of each server; servers share machines with ranks if devices are
    left.
    """

    num_trainer_nodes: int
    ranks_per_node: int
    server_nodes: tuple[int, ...]
    devices_per_server: int

    @property
    def num_nodes(self) -> int:
        """Total number of machines."""
        return max(self.num_trainer_nodes, *(node + 1 for node in self.server_nodes), 0)


def place(job: Job) -> Placement:
    """Assign machines of `cluster.n_gpus_per_node` devices, the trainer's first.

    Raises:
        ConfigError: the job does not fit into `cluster.n_nodes` such machines, or its ranks do not
            fill them.
    """
    per_node, limit = job.config.cluster.n_gpus_per_node, job.config.cluster.n_nodes
    world = job.allocation.train.world_size if job.allocation.train is not None else 0
    num_trainer_nodes = -(-world // per_node)
    if num_trainer_nodes > 1 and world % per_node:
        raise ConfigError(
            f"the allocation trains on {world} ranks and cluster.n_gpus_per_node is {per_node}; "
            "on several machines the first must be a multiple of the second"
        )
    rollout = job.allocation.rollout
    size = rollout.world_size // rollout.data if job.num_servers and rollout is not None else 1
    if size > per_node:
        raise ConfigError(
            f"a server of the allocation has {size} devices and cluster.n_gpus_per_node is {per_node}; "
            "a server must fit into one machine"
        )
    free = [per_node] * limit
    for node in range(min(num_trainer_nodes, limit)):
        free[node] = max(per_node - world, 0)
    slots = [node for node, devices in enumerate(free) for _ in range(devices // size)]
    if num_trainer_nodes > limit or len(slots) < job.num_servers:
        raise ConfigError(
            f"the allocation {job.allocation} needs more than cluster.n_nodes = {limit} machines with "
            f"cluster.n_gpus_per_node = {per_node} devices: raise them, or use fewer ranks or servers"
        )
    ranks_per_node = world // num_trainer_nodes if num_trainer_nodes else 0
    return Placement(num_trainer_nodes, ranks_per_node, tuple(slots[: job.num_servers]), size)
