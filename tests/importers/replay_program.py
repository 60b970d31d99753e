"""Import one batch from three formats, train on each in this process; print results as JSON.

`python replay_program.py MODEL FOLDER`
"""

import importlib
import json
import sys
from pathlib import Path

import yaml

from areal_core.config import PPOConfig, config_from_dict, config_to_dict
from recorder.trainers.importing import import_record
from replayer.request import Request
from replayer.rerun import verdict_at_once
from replayer.run import replay_and_compare

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
dataproto, pickled = (importlib.import_module(f"importers.{name}") for name in ("dataproto", "pickled"))
WRITERS = {
    "slime": pickled.write_slime,
    "areal": pickled.write_areal_list,
    "verl": dataproto.write_verl,
}


def main(model: str, folder: Path) -> None:
    """Train on the first step of each format."""
    tree = yaml.safe_load((HERE.parent / "debug" / "tiny.yaml").read_text())
    tree |= {"cluster": {"fileroot": str(folder / "files")}}
    tree["actor"] |= {"path": model, "use_decoupled_loss": False}
    config = config_to_dict(config_from_dict(tree, PPOConfig))
    summaries = {}
    for name, write in WRITERS.items():
        (folder / name).mkdir()
        record = folder / f"{name}-record"
        import_record(write(folder / name), record, name, config, model)
        report = replay_and_compare(Request(str(record), 0, 0))
        (result,) = report.steps
        summaries[name] = {
            "guarantee": report.guarantee.kind,
            "exit_code": verdict_at_once(report).exit_code,
            "identical": report.identical,
            "loss": result.loss.hex(),
            "grad_norm": result.grad_norm.hex(),
            "stats": {
                stat: value for stat, value in result.replayed.items() if "/rewards" in stat or "n_" in stat
            },
        }
    print(json.dumps(summaries))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
