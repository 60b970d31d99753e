"""Leave the tensors out of a weight update that the servers hold already.

    weights ──> hash of each ──> compared with those of the last update ──> the changed ones

All tensors are sent first, after a failure, to a server that has joined or was restarted, and after
`anchor_interval` deltas. That the servers kept the rest is proved by the checksums of all tensors
after each update (`verification.WeightCheck`), before the next request.
"""

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from areal_core.servers.pool import ServerPool
from areal_core.servers.server import Server
from areal_core.servers.verification import sha256_of, words_hash


class Delta:
    """The tensors of the last update that succeeded.

    Args:
        anchor_interval: deltas until all tensors are sent again; 0: never without a need.
    """

    def __init__(self, anchor_interval: int = 0) -> None:
        self.anchor_interval = anchor_interval
        self._sent: dict[str, str] = {}  # hashes
        self._held: dict[Server, str] = {}  # versions
        self._num_deltas = 0
        self._is_anchor = True

    def changed(
        self, weights: Iterable[tuple[str, Tensor]], pool: ServerPool, is_proved: Callable[[str], bool]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that a server may lack; at least the last one, which brings the version.

        Args:
            pool: refreshed, so that a server which was restarted is known by its version.
            is_proved: whether the servers' checksums show that they hold a tensor of this name.
        """
        held, self._held = self._held, {}  # nothing is known until `commit`
        known = all(held.get(server, "") == pool.versions.get(server) for server in pool.servers)
        self._is_anchor = not known or 0 < self.anchor_interval <= self._num_deltas
        before, self._sent = {} if self._is_anchor else self._sent, {}
        left_out, has_sent = list[tuple[str, Tensor]](), False
        for name, tensor in weights:
            hashed = sha256_of(tensor) if tensor.device.type == "cpu" else words_hash(tensor)
            self._sent[name] = hashed
            if before.get(name) == hashed and is_proved(name):
                left_out = [(name, tensor)]
            else:
                has_sent = True
                yield name, tensor
        yield from () if has_sent else left_out

    def commit(self, version: int, pool: ServerPool) -> None:
        """Remember that the servers hold all tensors of the last iteration as `version`."""
        self._held = dict.fromkeys(pool.servers, str(version))
        self._num_deltas = 0 if self._is_anchor else self._num_deltas + 1
