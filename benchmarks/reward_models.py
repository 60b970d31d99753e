"""Train the three steps of the TL;DR example and draw what PPO makes of the reward model's scores.

    OMP_NUM_THREADS=1 python benchmarks/reward_models.py [--seeds 3] [--folder DIR]

Runs examples/tldr_data.py, tldr_sft.py and tldr_reward.py once and tldr_ppo.py per seed, with their
own YAML files, on one CPU thread. Writes docs/reward_models.svg and prints the table of
docs/reward_models.md. The share of best summaries is counted in the records of the runs; no reward
depends on it.
"""

import argparse
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from learning_curves import GAP, STYLE, TITLE_HEIGHT
from markupsafe import Markup
from transformers import AutoTokenizer

from areal_debug.report.charts import HEIGHT, WIDTH, line, shares
from recorder import open_record

ROOT = Path(__file__).parents[1]
Curve = list[tuple[int, float]]  # steps trained, value
SCORE = "eval-rollout/reward"


def run(folder: Path, name: str, *overrides: str) -> tuple[Path, float]:
    """Train one step of the example; return the folder of its logs, and its CPU seconds."""
    given = [f"cluster.fileroot={folder}", f"train_dataset.path={folder}/tldr", *overrides]
    before = time.process_time()
    importlib.import_module(name).main(["--config", f"{ROOT}/examples/{name}.yaml", *given])
    seconds = time.process_time() - before
    trial = next((o.partition("=")[2] for o in overrides if o.startswith("trial_name=")), "trial0")
    [logs] = folder.glob(f"logs/*/{name.replace('_', '-')}/{trial}")
    return logs, seconds


def stats_of(logs: Path) -> list[dict[str, Any]]:
    """Return the statistics of each step."""
    return [json.loads(text) for text in (logs / "stats.jsonl").read_text().splitlines()]


def curve_of(stats: Sequence[dict[str, Any]], name: str) -> Curve:
    """Return the values of a statistic by the number of steps trained."""
    return [(step["step"] + 1, step[name]) for step in stats if name in step]


def before_and_after(stats: Sequence[dict[str, Any]], name: str) -> str:
    """Return a statistic of the validation rows before the first step and after the last."""
    return f"{stats[0][f'eval-before-{name}']:.2f} → {stats[-1][f'eval-{name}']:.2f}"


def share_of_best(logs: Path, folder: Path) -> Curve:
    """Return the share of sampled summaries that are the best one, by steps trained."""
    rows = [json.loads(text) for text in (folder / "tldr/train.jsonl").read_text().splitlines()]
    best = {row["messages"][0]["content"]: row["best"] for row in rows}
    tokenizer = AutoTokenizer.from_pretrained(folder / "tldr/model")
    record = open_record(logs / "record")
    curve = []
    for step in record.steps:
        batch = record.step(step).batch(0)
        found = []
        for begin, end in zip(batch["cu_seqlens"][:-1], batch["cu_seqlens"][1:], strict=True):
            ids, sampled = batch["input_ids"][begin:end], batch["loss_mask"][begin:end].astype(bool)
            post = tokenizer.decode(ids[~sampled], skip_special_tokens=True).strip()
            found.append(tokenizer.decode(ids[sampled], skip_special_tokens=True).strip() == best[post])
        curve.append((step, float(np.mean(found))))
    return curve


def picture(scores: Sequence[Curve], best: Sequence[Curve]) -> str:
    """Return an SVG of two panels: the mean reward of held-out posts, the share of best ones."""
    steps = [step for step, _ in scores[0]]
    means = [float(np.mean([curve[i][1] for curve in scores])) for i in range(len(steps))]
    ends = (f"{min(means):.1f}", f"{max(means):.1f}")
    panels = {
        "Reward of held-out posts": line(steps, means, str(steps[0]), f"{steps[-1]} steps", ends),
        "Sampled summaries that are the best": shares(best, "0", f"{best[0][-1][0]} steps"),
    }
    drawn = [
        Markup(
            '<text class="title" x="{0}" y="22">{1}</text><svg x="{2}" y="{3}" width="{4}" height="{5}">{6}</svg>'
        ).format(x + GAP, title, x, TITLE_HEIGHT, WIDTH, HEIGHT, chart)
        for x, (title, chart) in zip(range(0, 2 * (WIDTH + GAP), WIDTH + GAP), panels.items(), strict=True)
    ]
    width, height = 2 * (WIDTH + GAP), HEIGHT + TITLE_HEIGHT + GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f'<style>{STYLE}</style><rect class="paper" width="{width}" height="{height}"/>{"".join(drawn)}</svg>\n'
    )


def spread(curves: Sequence[Curve]) -> str:
    """Return the first and last values, as ranges over the seeds."""
    ends = [[curve[at][1] for curve in curves] for at in (0, -1)]
    return " → ".join(f"{min(values):.2f} to {max(values):.2f}" for values in ends)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of PPO")
    parser.add_argument("--folder", type=Path, help="where runs are written; by default a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = (options.folder or Path(name)).resolve()
        sys.path.insert(0, str(ROOT / "examples"))
        importlib.import_module("tldr_data").write(folder / "tldr")
        supervised, of_sft = run(folder, "tldr_sft", f"actor.path={folder}/tldr/model")
        ranked, of_reward = run(folder, "tldr_reward")
        runs = [
            run(folder, "tldr_ppo", f"seed={seed}", f"trial_name=seed{seed}", "debug.dump_rollout_data=true")
            for seed in range(1, options.seeds + 1)
        ]
        stats = [stats_of(logs) for logs, _ in runs]
        scores = [curve_of(one, SCORE) for one in stats]
        best = [share_of_best(logs, folder) for logs, _ in runs]
        (ROOT / "docs/reward_models.svg").write_text(picture(scores, best))
        loss = before_and_after(stats_of(supervised), "sft/loss/avg")
        right = before_and_after(stats_of(ranked), "rw/correct_ratio/avg")
    print("| step | measure | before → after | CPU seconds |\n|---|---|---|---|")
    print(f"| SFT | loss of held-out summaries | {loss} | {of_sft:.0f} |")
    print(f"| reward model | held-out pairs with the better summary above | {right} | {of_reward:.0f} |")
    seconds = max(used for _, used in runs)
    print(f"| PPO | reward of held-out posts | {spread(scores)} | {seconds:.0f} |")
    print(f"| PPO | sampled summaries that are the best | {spread(best)} | |")


if __name__ == "__main__":
    main()
