"""A SLURM step that runs one inference server and publishes its address to the batch job.

`python -m areal_core.launch.slurm_server PLAN.json HOST NAMES_FOLDER INDEX`. The port is chosen
here, on the server's machine.
"""

import json
import sys
from pathlib import Path

from areal_core.launch.placement import ServerPlan, start_server
from areal_core.launch.torchrun import ended_on_signals, shell_code
from areal_core.servers.discovery import FolderNames


def main(plan_file: str, host: str, names: str, index: str) -> int:
    """Serve until the server ends; return its exit code."""
    plan = ServerPlan(**json.loads(Path(plan_file).read_text()))
    with ended_on_signals():
        server = start_server(plan, host)
        try:
            FolderNames(names).add(f"servers/{index}", server.server.address)
            return shell_code(server.process.wait())
        finally:
            server.stop()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
