"""The house rules that a machine can hold: who imports whom, what stays light, which names are ours."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "areal_core": set(),
    "recorder": set(),
    "hangdoctor": set(),
    "replayer": {"areal_core", "recorder"},
    "consistency": {"areal_core", "recorder"},
    "areal_debug": {"areal_core", "recorder", "replayer", "consistency", "hangdoctor"},
}
HEAVY = ("torch", "transformers", "sglang")


def imported_packages(file: Path) -> set[str]:
    """Top-level packages that a file imports anywhere, functions included."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_package_imports_only_what_lies_below_it(package):
    forbidden = set(MAY_IMPORT) - {package} - MAY_IMPORT[package]
    wrong = {
        f"{file.relative_to(ROOT)} imports {name}"
        for file in (ROOT / package).rglob("*.py")
        for name in imported_packages(file) & forbidden
    }
    assert wrong == set()


def test_hangdoctor_never_imports_torch():
    assert not [f for f in (ROOT / "hangdoctor").rglob("*.py") if imported_packages(f) & set(HEAVY)]


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_package_name_resolves_to_ours(package):
    assert Path(importlib.import_module(package).__file__).parent == ROOT / package


@pytest.mark.parametrize("start", ["import recorder", "import hangdoctor", "import areal_debug.cli"])
def test_light_parts_start_without_heavy_imports(start):
    code = f"import sys; {start}; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
