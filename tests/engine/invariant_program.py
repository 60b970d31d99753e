"""Log-probs of fixed rows with `attn_impl=batch_invariant`, on ranks that share or divide the rows.

Arguments: folder of a model, number of sequence-parallel ranks. Prints on rank 0 the log-probs of
every row, as hexadecimal floats.
"""

import torch

from areal_core.config import TrainEngineConfig
from areal_core.engine.parity import batch_of, require_parity
from areal_core.engine.ranks import Ranks, join_ranks
from areal_core.trainer.build import shard_engine

LENGTHS = (150, 2, 40, 9, 33, 64)


def score(path: str, ranks: Ranks) -> list[list[str]]:
    """Score the rows of this data-parallel rank, and gather those of all; a collective."""
    engine = shard_engine(TrainEngineConfig(path=path, dtype="float32", attn_impl="batch_invariant"), ranks)
    require_parity(engine, path)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(5, 100, (length,), generator=generator) for length in LENGTHS]
    mine = range(ranks.data_parallel_rank, len(rows), ranks.data_parallel_size)
    scored = engine.compute_logprobs(batch_of([rows[row] for row in mine])).tolist()
    found = {
        row: [value.hex() for value in line[: LENGTHS[row] - 1]]
        for row, line in zip(mine, scored, strict=True)
    }
    gathered = {row: line for part in ranks.gather_objects(found) for row, line in part.items()}
    return [gathered[row] for row in range(len(rows))]


def main(path: str, sequence_parallel: str) -> object:
    return score(path, join_ranks("cpu", sequence_parallel=int(sequence_parallel)))
