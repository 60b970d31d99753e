"""Log-probs and gradient norms of a step's rows, with the weights that the step starts from.

In float64, with the model's own class from Transformers, one row at a time; a second pass in
float32 measures how far float32 is from that.
"""

from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal_core.engine.routers import Routers
from replayer.crosscheck.options import Options
from replayer.crosscheck.step_rows import Floats, StepRows, Update
from replayer.crosscheck.twin import UNIT

# The recorded run has other kernels than the float32 pass, whose rounding differs as much from it.
NOISE_FACTOR = 4.0


@dataclass(frozen=True)
class ModelPass:
    """A model in float64 and in float32, each with its routers where the run replayed experts."""

    models: tuple[tuple[Any, Routers | None], tuple[Any, Routers | None]]
    temperature: float

    def logprobs(self, rows: StepRows, ahead: int = 1) -> tuple[Floats, float]:
        """Return the log-probs of all rows, [N, T], so many tokens ahead of their context, and the noise of float32."""
        found = []
        for model, routers in self.models:
            matrix = np.zeros(rows.mask.shape)
            with torch.no_grad():
                for row in np.flatnonzero(rows.lengths > ahead).tolist():
                    logprobs = self.row(model, routers, rows, row, ahead)
                    matrix[row, ahead - 1 : ahead - 1 + len(logprobs)] = logprobs.double().numpy()
            found.append(np.where(rows.mask, matrix, 0.0))
        exact, rounded = found
        return exact, NOISE_FACTOR * float(np.abs(exact - rounded).max()) + UNIT

    def norm(
        self, rows: StepRows, update: Update, gradient: Tensor, parts: Tensor, options: Options
    ) -> tuple[float, float]:
        """Return the norm of a gradient [n, T] by log-probs, of `parts` [n] that are clipped or not, and its noise."""
        limit, ahead = options.max_norm if "clipped" in options.gradient_of else inf, options.labels_ahead
        norms = []
        for model, routers in self.models:
            model.zero_grad()
            for number, row in enumerate(update.rows.tolist()):
                if limit < inf and number and parts[number] != parts[number - 1]:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
                if gradient[number].any():
                    logprobs = self.row(model, routers, rows, row, ahead)
                    logprobs.backward(gradient[number, ahead - 1 :][: len(logprobs)].to(logprobs.dtype))
            found = [p.grad.double() for p in model.parameters() if p.grad is not None]
            # FSDP2 divides along the first dimension
            squares = [x[: -(-len(x) // options.shards)].square().sum() for x in found]
            norms.append(float(torch.stack(squares).sum().sqrt()) if squares else 0.0)
        exact, rounded = norms
        return exact, NOISE_FACTOR * abs(exact - rounded) + exact * (2 * rows.noise + 64 * UNIT)

    def row(self, model: Any, routers: Routers | None, rows: StepRows, row: int, ahead: int) -> Tensor:
        """Return the log-probs of a row's tokens but the first `ahead`."""
        tokens = torch.from_numpy(rows.input_ids[row, : rows.lengths[row]])[None]
        if routers is not None and rows.experts is not None:
            routers.replay(torch.from_numpy(rows.experts[row, : rows.lengths[row]]), tokens.device)
        logits = model(input_ids=tokens, use_cache=False).logits[0, :-ahead] / self.temperature
        chosen = logits.gather(1, tokens[0, ahead:, None])[:, 0]
        logprobs: Tensor = chosen - logits.logsumexp(1)
        return logprobs


def load_pass(path: str, temperature: float, *, replays_experts: bool = False) -> ModelPass:
    """Load a checkpoint in Hugging Face format. Raises OSError, ValueError as Transformers does."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    exact, rounded = (
        AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()
        for dtype in (torch.float64, torch.float32)
    )
    exact.set_experts_implementation("eager")  # the grouped kernels have no float64
    first, second = ((model, Routers(model) if replays_experts else None) for model in (exact, rounded))
    return ModelPass((first, second), temperature)
