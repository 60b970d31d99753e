"""A tiny Qwen2.5-VL learns to count shapes in pictures, on a CPU: SFT until some answers are right,
then GRPO with the embedded engine.

    python examples/vision_shapes.py runs/vision_shapes

About two minutes on one free core. It makes the model, runs `vision_sft.py` and `vision_grpo.py`
with the files `vision_shapes_sft.yaml` and `vision_shapes.yaml`, and draws `curve.svg`.
"""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from areal_core.testing.tiny_vision import make_tiny_vision_model

EXAMPLES = Path(__file__).resolve().parent
WIDTH, HEIGHT, LEFT, TOP = 640, 300, 60, 30
STYLE = (
    "text{font:13px sans-serif;fill:#444}.axis{stroke:#999}.train{fill:none;stroke:#88a;stroke-width:1.5}"
    ".valid{fill:#c33}"
)


def main(folder: Path) -> None:
    """Make the model, fine-tune it, train it by GRPO, and draw the rewards."""
    if find_spec("torchvision") is None:
        raise SystemExit("Error: pictures need torchvision: pip install torchvision, of the build of torch")
    folder = folder.resolve()
    untrained, model = folder / "model-untrained", folder / "model"
    make_tiny_vision_model(untrained, "qwen2_5_vl", seed=1)
    train("vision_sft.py", "vision_shapes_sft.yaml", folder, untrained)
    (tuned,) = (folder / "checkpoints").glob("*/vision-shapes/sft/default/final")
    tuned.rename(model)
    train("vision_grpo.py", "vision_shapes.yaml", folder, model)
    (stats,) = (folder / "logs").glob("*/vision-shapes/grpo/stats.jsonl")
    (folder / "curve.svg").write_text(curve(stats))
    print(f"rewards of training and validation: {folder / 'curve.svg'}")


def train(script: str, config: str, folder: Path, model: Path) -> None:
    """Run a script with a config file of this folder."""
    options = [f"cluster.fileroot={folder}", f"actor.path={model}"]
    command = ["-m", "areal_debug", "train", str(EXAMPLES / script), "--config", str(EXAMPLES / config)]
    subprocess.run([sys.executable, *command, *options], check=True)


def curve(stats: Path) -> str:
    """Return an SVG of the rewards in a `stats.jsonl`: a line of training, dots of validation."""
    rows = [json.loads(line) for line in stats.read_text().splitlines()]
    rows = [row for row in rows if "rollout/reward" in row]
    last = max(row["step"] for row in rows)

    def place(step: float, reward: float) -> tuple[float, float]:
        wide, high = WIDTH - LEFT - 20, HEIGHT - 2 * TOP
        return round(LEFT + step / last * wide, 1), round(TOP + (1 - reward) * high, 1)

    points = " ".join("{},{}".format(*place(row["step"], row["rollout/reward"])) for row in rows)
    dots = [(row["step"], row["eval-rollout/reward"]) for row in rows if "eval-rollout/reward" in row]
    drawn = [f'<polyline class="train" points="{points}"/>']
    for step, reward in dots:
        x, y = place(step, reward)
        drawn.append(
            f'<circle class="valid" cx="{x}" cy="{y}" r="4"/><text x="{x}" y="{y - 8}">{reward:.2f}</text>'
        )
    for reward in (0, 0.5, 1):
        x, y = place(0, reward)
        drawn.append(
            f'<line class="axis" x1="{x}" y1="{y}" x2="{WIDTH - 20}" y2="{y}" stroke-dasharray="2 4"/>'
        )
        drawn.append(f'<text x="20" y="{y + 4}">{reward}</text>')
    title = f"share of right counts over {last + 1} steps of GRPO: line training, dots held-out pictures"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"><style>{STYLE}</style>'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>{"".join(drawn)}'
        f'<text x="{LEFT}" y="{HEIGHT - 8}">{title}</text></svg>\n'
    )


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/vision_shapes"))
