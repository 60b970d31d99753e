"""Make a tiny model and fine-tune it to add until some answers are right, so RL gets rewards."""

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import Any

from areal_core.config import SFTConfig, load_expr_config
from areal_core.data import arithmetic_rows, get_dataset
from areal_core.embedded.engine import EmbeddedEngine
from areal_core.embedded.replica import Replica
from areal_core.rollout.types import ModelRequest, Sampling
from areal_core.testing import make_tiny_model
from areal_core.trainer.build import load_tokenizer
from areal_core.trainer.sft import SFTTrainer

Row = dict[str, Any]

RIGHT_ENOUGH = 0.3
STEPS_BETWEEN_TESTS = 5


def main(argv: list[str]) -> None:
    """Make the model at `actor.path` and train it until a test is passed."""
    config, _ = load_expr_config(argv, SFTConfig)
    make_tiny_model(config.actor.path, seed=config.seed)
    rows = arithmetic_rows(**config.train_dataset.dataset_kwargs)
    dataset = get_dataset(config.train_dataset, tokenizer=load_tokenizer(config))
    with SFTTrainer(config, dataset) as trainer:
        trainer.train(stop=right_sometimes(trainer, rows[:96]))


def right_sometimes(trainer: SFTTrainer, rows: Sequence[Row]) -> Callable[[int], bool]:
    """Return a stop criterion, tested every few steps: enough sampled answers are right."""
    replica = Replica(trainer.config.actor.path, trainer.actor.dtype, trainer.ranks.device)

    def stop(step: int) -> bool:
        if (step + 1) % STEPS_BETWEEN_TESTS:
            return False
        replica.load(trainer.actor.named_full_tensors())
        return asyncio.run(share_right(replica, trainer.tokenizer, rows)) >= RIGHT_ENOUGH

    return stop


async def share_right(replica: Replica, tokenizer: Any, rows: Sequence[Row]) -> float:
    """Return the share of questions whose sampled answer is right.

    `tokenizer` is Any: its methods return unions.
    """
    end = tokenizer.eos_token_id
    engine = EmbeddedEngine(replica, replica.model.config.vocab_size, end_token_ids=(end,))
    sampling = Sampling(max_new_tokens=4, stop_token_ids=[end])

    async def is_right(index: int, row: Row) -> bool:
        ids = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=False)
        request = ModelRequest(input_ids=ids, sampling=sampling, metadata={"prompt_id": index})
        response = await engine.agenerate(request)
        return bool(
            tokenizer.decode(response.output_tokens, skip_special_tokens=True).strip() == row["answer"]
        )

    right = await asyncio.gather(*(is_right(index, row) for index, row in enumerate(rows)))
    return sum(right) / len(right)


if __name__ == "__main__":
    main(sys.argv)
