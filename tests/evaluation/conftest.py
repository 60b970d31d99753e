"""Results on disk, printed reports, and models whose greedy completions differ."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from areal_core.testing import make_tiny_model
from areal_debug.eval.report import report_of
from areal_debug.render import console
from areal_debug.report.terminal import print_report


def write_evaluation(folder: Path, of_models: dict[str, list[dict]], **summary: object) -> Path:
    """Write the files of an evaluation: the lines of each model, and a summary with these facts."""
    folder.mkdir(parents=True, exist_ok=True)
    models = []
    for number, (path, lines) in enumerate(of_models.items()):
        file = f"samples-{number}.jsonl"
        (folder / file).write_text("".join(json.dumps(line) + "\n" for line in lines))
        models.append({"path": path, "version": number, "file": file, "seconds": 2.0})
    document = {"rows": "valid", "models": models} | summary
    (folder / "evaluation.json").write_text(json.dumps(document))
    return folder


def printed(report, capsys) -> str:
    print_report(console(), report_of(report))
    return " ".join(capsys.readouterr().out.split())


@pytest.fixture(scope="session")
def random_model() -> Callable[[Path, int], Path]:
    """Write a model that does not repeat its last token, as one with tied embeddings does."""

    def write(folder: Path, seed: int) -> Path:
        make_tiny_model(folder)
        config = AutoConfig.from_pretrained(folder, tie_word_embeddings=False)
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return folder

    return write
