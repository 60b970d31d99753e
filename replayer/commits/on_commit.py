"""One rank of a replay with the code of a commit: `python on_commit.py TASK`, in its checkout.

It is run by its path beside the packages of that commit, and uses only what those offer:
`replayer.run` and `replayer.request`.
"""

import json
import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any


def main(task: dict[str, Any]) -> None:
    """Run a task with the code of the current folder; rank 0 writes its report.

    Args:
        task: `task`, "replay" or "layers"; `request`, members of a `Request`; `place`, the
            checkout; `report`, the file to write.
    """
    from replayer.request import Request
    from replayer.run import replay, replay_and_compare

    given = task["request"]
    request = Request(**given | {"settings": tuple(given.get("settings", ()))})
    if task["task"] == "replay":
        report = replay_and_compare(request).to_dict()
    else:
        spec = spec_from_file_location("on_commit_layers", Path(__file__).with_name("layers.py"))
        assert spec is not None
        assert spec.loader is not None
        layers = sys.modules[spec.name] = module_from_spec(spec)
        spec.loader.exec_module(layers)
        found: list[Any] = []
        replay(request, [layers.trace_layers(request.last, found.append, task["place"])])
        report = {"calls": [[vars(call) for call in calls] for calls in found[0]] if found else []}
    if os.environ.get("RANK", "0") == "0":
        Path(task["report"]).write_text(json.dumps(report))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
