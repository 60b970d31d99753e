"""A real local Ray: two actors that carry ranks, collected by one task a node."""

import json
import warnings

import pytest

from hangdoctor.collect.discover import Search
from hangdoctor.collect.pyspy import Options
from hangdoctor.collect.ray_nodes import collect_ray
from hangdoctor.collect.write import read_manifest

pytestmark = pytest.mark.long


@pytest.fixture
def actors():
    """Handles of two actors in which a method waits; rank 1 is in `wait_for_reward`."""
    ray = pytest.importorskip("ray")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)

        class Trainer:
            def name(self):
                return "up"

            def wait_for_weights(self):
                import time

                time.sleep(600)

            def wait_for_reward(self):
                import time

                time.sleep(600)

        handles = []
        for rank in range(2):
            variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "ray", "MASTER_PORT": "1"}
            handles.append(
                ray.remote(Trainer).options(num_cpus=0.5, runtime_env={"env_vars": variables}).remote()
            )
        assert ray.get([handle.name.remote() for handle in handles], timeout=120) == ["up", "up"]
        yield handles
        ray.shutdown()


def test_ranks_in_ray_actors_are_collected_by_a_task_on_their_node(actors, tmp_path):
    actors[0].wait_for_weights.remote()
    actors[1].wait_for_reward.remote()
    manifest = collect_ray("auto", Search(), tmp_path, Options(interval_s=1.0))
    assert manifest == read_manifest(tmp_path)
    assert [(p.name, p.status) for p in manifest.processes if p.role == "trainer"] == [
        ("rank_0", "dumped"),
        ("rank_1", "dumped"),
    ]
    for name, function in (("rank_0", "wait_for_weights"), ("rank_1", "wait_for_reward")):
        frames = [
            frame["name"].rsplit(".")[-1]
            for thread in json.loads((tmp_path / f"samples/1/{name}.json").read_text())
            for frame in thread["frames"]
        ]
        assert function in frames
