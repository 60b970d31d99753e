"""Collect the wheels that a GPU machine without a network lacks.

    python -m tests.gpu.wheels FOLDER [VERSION OF PYTHON THERE]

Such a machine has torch, Transformers, safetensors and numpy. There:

    python -m pip install --no-index --no-deps --target SITE FOLDER/*.whl
    PYTHONPATH=SITE python -m tests.gpu
"""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# What the checks import beyond torch and Transformers; what it needs follows from its metadata.
ROOTS = (
    *("omegaconf", "crc32c", "py-spy", "click", "rich", "jinja2", "deepdiff", "packaging", "msgspec"),
    *("psutil", "zarr", "aiohttp", "httpx", "math-verify", "accelerate", "pillow"),
)
THERE = {"torch", "transformers", "safetensors", "numpy", "huggingface-hub", "tokenizers"}
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64",
             "manylinux_2_12_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "manylinux_2_5_x86_64")  # fmt: skip
LARGEST_MIB = 60


def main() -> None:
    folder = Path(sys.argv[1])
    python = sys.argv[2] if len(sys.argv) > 2 else "3.12"
    collect(folder, python)
    size = sum(file.stat().st_size for file in folder.glob("*.whl")) / 2**20
    print(f"{len(list(folder.glob('*.whl')))} wheels, {size:.1f} MiB")
    if size > LARGEST_MIB:
        sys.exit(f"more than {LARGEST_MIB} MiB: leave a package out")


def collect(folder: Path, python: str) -> None:
    """Download the wheels for a version of Python; build that of a package without one."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    given = ["--no-deps", "--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    packages = [f"{name}=={metadata.version(name)}" for name in sorted(needed())]
    binary = [name for name in packages if not name.startswith("antlr4")]
    subprocess.run([*pip, "download", *given, *platforms, "--dest", folder, *binary], check=True)
    sources = [name for name in packages if name not in binary]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder, *sources], check=True)


def needed() -> set[str]:
    """Return the packages that are installed here and lack there."""
    found: set[str] = set()
    left = list(ROOTS)
    while left:
        name = canonicalize_name(left.pop())
        if name in found | THERE:
            continue
        found.add(name)
        for requirement in map(Requirement, metadata.requires(name) or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                left.append(requirement.name)
    return found


if __name__ == "__main__":
    main()
