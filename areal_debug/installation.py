"""What is installed: the extras, the examples, and whether the packages are really ours.

`pip install areal-debug` brings what reads, compares and diagnoses; extras bring the rest. Other
projects on the package index are named `recorder`, `replayer` and `consistency`, too.
"""

import importlib
import importlib.util
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

EXTRAS = tomllib.loads(Path(__file__).with_name("extras.toml").read_text(encoding="utf-8"))
EXTRA_OF = {package: extra for extra, packages in EXTRAS.items() for package in packages}
# Of a large extra, and enough alone for the verbs that read: by the name to install.
SMALL = {"tensorboard": "tensorboard", "PIL": "pillow"}
PACKAGES = ("areal_core", "recorder", "replayer", "consistency", "hangdoctor")
MARK = b"of areal-debug"  # in the docstring of each package
DOCSTRING_BYTES = 400

ROOT = Path(__file__).parents[1]
# in an installed package, and in a checkout
EXAMPLES = next((p for p in (ROOT / "areal_debug/examples", ROOT / "examples") if p.is_dir()), ROOT)


def install_hint(error: ModuleNotFoundError) -> str | None:
    """Return the sentence for a package of an extra that is not installed; None for another one."""
    package = (error.name or "").split(".")[0]
    if package not in EXTRA_OF:
        return None
    command = SMALL.get(package, f"'areal-debug[{EXTRA_OF[package]}]'")
    return f"this needs the package {package}, which is not installed: pip install {command}"


def require(package: str) -> None:
    """Raise ModuleNotFoundError for a package that only children of this process would import."""
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(name=package)


def check_packages(root: Path = ROOT) -> None:
    """Raise ImportError if another distribution's package has the name of one of ours."""
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        found = Path(spec.origin) if spec is not None and spec.origin else None
        if found is None or found.parent != root / name or MARK not in found.read_bytes()[:DOCSTRING_BYTES]:
            raise ImportError(
                f"the package {name} at {found} is not the one of areal-debug: uninstall the other "
                f"distribution and install areal-debug again, or use a virtual environment of its own"
            )


def lazy_names(modules: Mapping[str, Sequence[str]], package: str) -> tuple[Callable[[str], Any], list[str]]:
    """Return `__getattr__` and `__all__` of a package whose names are imported when they are used.

    Args:
        modules: the names, by the module of ours that defines them.
        package: the name of the package.
    """
    module_of = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        check_packages()
        return getattr(importlib.import_module(module_of[name]), name)

    return get, sorted(module_of)


def names_of(source: str, package: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that has the public names of another one of ours."""

    def get(name: str) -> Any:
        check_packages()
        module = importlib.import_module(source)
        if name not in module.__all__:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(module, name)

    return get
