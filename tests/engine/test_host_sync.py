"""A step reads from the device once: nothing in a micro-batch waits for it."""

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from areal_core.testing import likelihood_with_entropy
from tests.engine import steps_program as program

READS = {torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.nonzero}


class Scalars(TorchDispatchMode):
    """Count reads of one number, by `float`, `int`, `bool` and `item`, also in autograd."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


class Reads(TorchFunctionMode):
    """Count calls that copy a float tensor to the host. Masks and lengths are in host memory."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += function in READS and args[0].is_floating_point()
        return function(*args, **(kwargs or {}))


def likelihood(logprobs, entropies, flat):
    return -(logprobs * flat["loss_mask"]).sum()


def syncs_of_a_step(engine, loss):
    batch = program.rows()
    engine.train_batch(batch, loss, lambda part: part["loss_mask"].sum())  # allocates the states
    with Scalars() as scalars, Reads() as reads:
        result = engine.train_batch(batch, loss, lambda part: part["loss_mask"].sum())
    return len(result.micro_batches), scalars.count, reads.count


@pytest.mark.long
@pytest.mark.parametrize("loss", [likelihood, likelihood_with_entropy])
def test_a_step_reads_its_numbers_at_once_however_many_micro_batches_it_has(ranks, tiny_model, loss):
    few = syncs_of_a_step(program.make_engine(ranks, str(tiny_model), 1000), loss)
    many = syncs_of_a_step(program.make_engine(ranks, str(tiny_model), 20), loss)
    assert (few[0], many[0]) == (1, 3)
    # The weight and the number of micro-batches, both in host memory, and then all results.
    assert few[1:] == many[1:] == (2, 1)
