"""A tiny model that samples and trains beside its engine, and writes what a user has in hand.

A row has the names of `Recorder.step`; `new` are the log-probs in the loss.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from areal_core.testing import make_tiny_model, make_tiny_tokenizer
from areal_debug import Recorder

disable_progress_bar()
GROUP, LIMIT = 4, 12
ANSWER, DIGITS = "abcdefghij", "0123456789"
TOKENIZER = make_tiny_tokenizer()
END = TOKENIZER.eos_token_id
Row = dict[str, Any]


def ids(text: str) -> list[int]:
    return [int(one) for one in TOKENIZER.convert_tokens_to_ids(list(text))]


def text(tokens: Sequence[int]) -> str:
    return "".join(TOKENIZER.convert_ids_to_tokens(int(token)) for token in tokens if token != END)


def first_weights(folder: Path) -> Path:
    """Train a random model to answer with 2 to 7 of twenty characters, and to end."""
    if (folder / "config.json").exists():
        return folder
    make_tiny_model(folder, hidden_size=32)
    model, chance = load(folder), random.Random(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for _ in range(150):
        answers = [
            [*ids(chance.choices(ANSWER + DIGITS, k=chance.randint(2, 7))), END]  # type: ignore[arg-type]
            for _ in range(40)
        ]
        rows = [{"prompt_tokens": ids(question(chance)), "completion_tokens": answer} for answer in answers]
        loss = -torch.cat(score(model, rows)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return save(model, folder)


def question(chance: random.Random) -> str:
    return f"{chance.choice(ANSWER)}{chance.choice(DIGITS)}:"


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


@torch.no_grad()
def answer(
    model: Any, prompts: list[list[int]], seeds: list[int], keep: Callable[[Tensor], Tensor] | None = None
) -> list[tuple[list[int], list[float]]]:
    """Sample a completion a prompt; `keep` takes log-probs [rows, vocabulary] to those kept."""
    chances = [torch.Generator().manual_seed(seed) for seed in seeds]
    found: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
    inputs, running = torch.tensor(prompts), [True] * len(prompts)
    for _ in range(LIMIT):
        logp = model(inputs).logits[:, -1].log_softmax(-1)
        if keep is not None:
            logp = logp.masked_fill(~keep(logp), -torch.inf).log_softmax(-1)
        drawn = [torch.multinomial(p.exp(), 1, generator=c) for p, c in zip(logp, chances, strict=True)]
        for row, token in enumerate(torch.cat(drawn).tolist()):
            if running[row]:
                found[row][0].append(token)
                found[row][1].append(float(logp[row, token]))
                running[row] = token != END
        inputs = torch.cat([inputs, torch.stack(drawn)], 1)
    return found


def score(model: Any, rows: Sequence[Row]) -> list[Tensor]:
    """Return the log-probs of each row's completion, with gradient."""
    whole = [[*row["prompt_tokens"], *row["completion_tokens"]] for row in rows]
    inputs = torch.tensor([tokens + [0] * (max(map(len, whole)) - len(tokens)) for tokens in whole])
    logp = model(inputs).logits[:, :-1].log_softmax(-1).gather(-1, inputs[:, 1:, None])[..., 0]
    return [
        logp[at, len(row["prompt_tokens"]) - 1 : len(tokens) - 1]
        for at, (row, tokens) in enumerate(zip(rows, whole, strict=True))
    ]


def kl3(difference: Tensor) -> Tensor:
    """Estimate a KL from log pi - log pi_ref."""
    return torch.expm1(-difference) + difference


class Run:
    """Actor, engine and reference, each with weights of its own."""

    def __init__(self, model: Path, prompts: int = 8, lr: float = 2e-3, beta: float = 0.0) -> None:
        self.actor, self.engine, self.reference = load(model), load(model), load(model)
        self.optimizer = torch.optim.AdamW(self.actor.parameters(), lr=lr, weight_decay=0.0)
        self.prompts, self.beta, self.chance, self.groups = prompts, beta, random.Random(1), 0

    def sync(self) -> None:
        self.engine.load_state_dict(self.actor.state_dict())

    def rollout(
        self,
        step: int,
        questions: list[str] | None = None,
        reward: Callable[[Row], float] = lambda row: share(row["completion"]),
        seeds: Callable[[int, int], int] = lambda step, row: 1000 * (step + 1) + row,
        keep: Callable[[Tensor], Tensor] | None = None,
    ) -> list[Row]:
        """Sample a group for each question with the engine's weights."""
        asked = questions or [question(self.chance) for _ in range(self.prompts)]
        given = [ids(one) for one in asked for _ in range(GROUP)]
        found = answer(self.engine, given, [seeds(step, row) for row in range(len(given))], keep)
        rows = []
        for at, (tokens, logp) in enumerate(found):
            row: Row = {"prompt_tokens": given[at], "completion_tokens": tokens, "logprobs": logp}
            row |= {
                "prompt": asked[at // GROUP],
                "completion": text(tokens),
                "group": self.groups + at // GROUP,
            }
            row |= {"versions": step, "loss_mask": [1] * len(tokens)}
            row |= {"finish_reason": "stop" if tokens[-1] == END else "length"}
            rows.append(row | {"reward": float(reward(row))})
        self.groups += len(asked)
        return rows

    @torch.no_grad()
    def prepare(self, rows: list[Row], eps: float = 1e-6) -> list[Row]:
        """Add log-probs of actor and reference, and advantages by group."""
        both = zip(rows, score(self.actor, rows), score(self.reference, rows), strict=True)
        for row, old, ref in both:
            own = torch.tensor([other["reward"] for other in rows if other["group"] == row["group"]])
            advantage = (row["reward"] - own.mean()) / (own.std() + eps) if len(own) > 1 else torch.zeros(())
            row |= {"old_logprobs": old.tolist(), "ref_logprobs": ref.tolist()}
            row |= {"advantages": [float(advantage)] * len(row["completion_tokens"])}
        return rows

    def update(self, rows: list[Row], loss: Callable[..., Tensor] | None = None, **how: Any) -> Row:
        """Take an optimizer step and return its statistics: loss, gradient norm, KL."""
        new = score(self.actor, rows)
        for row, logp in zip(rows, new, strict=True):
            row["new"] = logp.detach().tolist()
        total = (loss or policy_loss)(rows, new, beta=self.beta, **how)
        self.optimizer.zero_grad()
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.actor.parameters(), 1.0)
        self.optimizer.step()
        apart = torch.cat([torch.tensor(r["old_logprobs"]) - torch.tensor(r["ref_logprobs"]) for r in rows])
        return {"loss": float(total.detach()), "norm": float(norm), "kl": float(kl3(apart).mean())}


def share(answered: str) -> float:
    """Reward the share of letters, and less of it beyond six characters."""
    return sum(one in ANSWER for one in answered) / max(len(answered), len(answered) ** 2 / 6, 1)


def policy_loss(
    rows: list[Row],
    new: list[Tensor],
    beta: float = 0.0,
    high: float = 0.2,
    mask: str = "loss_mask",
    kl_mask: str = "loss_mask",
    kl: Callable[[Tensor], Tensor] = kl3,
    by_row: bool = False,
    batches: int = 1,
) -> Tensor:
    """Compute PPO's clipped loss and a KL; mean over tokens, rows, or means of micro-batches."""
    terms, counts = [], []
    for row, logp in zip(rows, new, strict=True):
        advantage = torch.tensor(row["advantages"])
        ratio = (logp - torch.tensor(row["old_logprobs"])).exp()
        loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1 + high))
        own = (loss * torch.tensor(row[mask])).sum()
        own = own + beta * (kl(logp - torch.tensor(row["ref_logprobs"])) * torch.tensor(row[kl_mask])).sum()
        terms.append(own)
        counts.append(float(sum(row[mask])))
    if by_row:
        return torch.stack([term / max(count, 1) for term, count in zip(terms, counts, strict=True)]).mean()
    size = len(rows) // batches
    return torch.stack(
        [
            torch.stack(terms[at : at + size]).sum() / sum(counts[at : at + size])
            for at in range(0, len(rows), size)
        ]
    ).mean()


def write(
    folder: Path,
    trainer: str,
    config: Row,
    model: Path,
    steps: Sequence[tuple[int, list[Row], Row]],
    computed: bool = True,
) -> None:
    """Write a record; `computed`: with the trainer's own numbers of each token."""
    left = {"new"} | (set() if computed else {"old_logprobs", "ref_logprobs", "advantages"})
    with Recorder(folder, config=config, trainer=trainer, model=model, overwrite=True) as recorder:
        for step, rows, stats in steps:
            samples = [{name: value for name, value in row.items() if name not in left} for row in rows]
            for sample, row in zip(samples, rows, strict=True):
                if computed and "new" in row:
                    sample["learning"] = {"current_logp": row["new"]} | sample.get("learning", {})
            recorder.step(step, samples, stats=stats)
