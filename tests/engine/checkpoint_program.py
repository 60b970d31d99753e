"""Two ranks load a checkpoint of one rank, train and save.

They save twice: synchronously, and in a background thread while they continue to train.

Arguments: model folder, checkpoint to load, output folder. Prints the checksums of the weights
after
loading and at the time of saving.
"""

import threading
from pathlib import Path

from areal_core.engine.checkpoint.background_save import BackgroundSave
from areal_core.engine.checkpoint.distributed import (
    load_checkpoint,
    save_checkpoint,
    take_snapshot,
    write_snapshot,
)
from areal_core.engine.ranks import join_ranks
from tests.engine import steps_program as program


def main(model: str, checkpoint: str, to: str) -> object:
    folder, ranks = Path(to), join_ranks("cpu")
    engines = {name: program.make_engine(ranks, model, 100) for name in ("actor", "critic")}
    state = load_checkpoint(checkpoint, engines)
    loaded = {name: engine.checksums() for name, engine in engines.items()}
    batch = program.rows(ranks.rank, ranks.world_size)
    program.train_step(engines["actor"], batch)
    save_checkpoint(folder / "waited", engines, state)
    writing, may_write = BackgroundSave(), threading.Event()
    snapshot = take_snapshot(folder / "beside", engines, state)

    def write_later(given_up: threading.Event) -> None:
        may_write.wait()  # until training has continued
        write_snapshot(snapshot, given_up)

    saved = {name: engine.checksums() for name, engine in engines.items()}
    writing.start(folder / "beside", write_later)
    program.train_step(engines["actor"], batch)
    may_write.set()
    writing.wait()
    ranks.barrier()
    return {"loaded": loaded, "saved": saved}
