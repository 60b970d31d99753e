"""One rank of `areal-debug check model`: arguments MODEL DTYPE C T."""

import sys
import time

from areal_debug.train.script import mistakes_as_sentences


def main(model: str, dtype: str, sequence_parallel: str, tensor_parallel: str) -> None:
    """Measure the parity of a model; rank 0 writes the report."""
    with mistakes_as_sentences():
        from transformers.utils import logging as transformers_logging

        from areal_core.config import TrainEngineConfig
        from areal_core.engine.parity import measure_parity, refuse_split_rows
        from areal_core.engine.ranks import join_ranks, leave_ranks
        from areal_core.trainer.build import shard_engine
        from areal_debug.render import write_report

        transformers_logging.set_verbosity_error()
        started = time.monotonic()
        ranks = join_ranks(sequence_parallel=int(sequence_parallel), tensor_parallel=int(tensor_parallel))
        engine = shard_engine(TrainEngineConfig(path=model, dtype=dtype), ranks)
        loaded = time.monotonic()
        parity = measure_parity(engine)
        refuse_split_rows(engine, parity, model)
        seconds = {"load_s": loaded - started, "check_s": time.monotonic() - loaded}
        if ranks.rank == 0:
            write_report(parity.as_dict() | seconds)
        leave_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])
