"""One rank of `areal-debug preflight`: `python -m areal_debug.preflight_rank FOLDER KEEP CONFIG_ARGUMENTS...`.

Takes one step and leaves it in FOLDER; KEEP names, as a JSON list, the parameters whose values are wanted, too.
"""

import json
import sys
from pathlib import Path

from areal_core.config import PPOConfig, config_to_dict, load_expr_config
from areal_core.engine.determinism import enforce_determinism
from areal_core.engine.errors import DeterminismError
from areal_debug.script import mistakes_as_sentences
from replayer.preflight import save_bits, take_step
from replayer.preflight_checks import check_process
from replayer.twice import write_repeat


def main(folder: str, keep: str, *arguments: str) -> None:
    """Take the step as it would be taken; where determinism cannot be had, without it, to see what it would cost."""
    with mistakes_as_sentences():
        config, _ = load_expr_config(list(arguments), PPOConfig)
        wanted = config_to_dict(config)
        if config.deterministic:
            try:
                enforce_determinism()
            except DeterminismError:
                config.deterministic = False  # the findings say what is missing
        bits = take_step(config, json.loads(keep))
    rank = bits.process.rank
    save_bits(bits, Path(folder), rank)
    if rank == 0:
        write_repeat(Path(folder), bits.outcome, check_process(wanted, bits.process))


if __name__ == "__main__":
    main(*sys.argv[1:])
