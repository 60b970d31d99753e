"""The signatures of the public API are those of its page: a change is seen, and announced."""

import importlib
import inspect
import re
from collections import ChainMap
from pathlib import Path
from typing import Any

from .test_reference_pages import reference

PAGE = Path(__file__).parents[2] / "docs" / "public_api.md"
BESIDE_OTHERS = r"areal_debug\.(areal|nemo_rl|skyrl|trl|verl)\."  # imported beside that trainer only
MARKS = r"(?s)(<!-- signatures -->\n```\n).*?(```\n)"


def found(name: str) -> Any:
    module, attribute = name.rsplit(".", 1)
    return getattr(importlib.import_module(module), attribute)


def names_of(parameters: inspect.Signature) -> str:
    shown, is_keyword = [], False
    for name, one in parameters.parameters.items():
        if one.kind is one.KEYWORD_ONLY and not is_keyword:
            shown += [] if any(text.startswith("*") for text in shown) else ["*"]
            is_keyword = True
        star = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        shown.append(star + name + ("=" if one.default is not one.empty else ""))
    return ", ".join(name for name in shown if name != "self")


def signatures(name: str) -> list[str]:
    """Return the lines of a function, or of a class and its public methods."""
    if re.match(BESIDE_OTHERS, name):
        return [name]
    thing = found(name)
    try:
        lines = [f"{name}({names_of(inspect.signature(thing))})"]
    except ValueError:
        lines = [name]
    if len(lines[0]) > 160:  # options of a config have their own reference
        lines = [f"{name}(...)"]
    if inspect.isclass(thing) and not issubclass(thing, tuple):
        bases = [base for base in thing.__mro__ if base.__module__.startswith("areal_core.trainer")]
        for method, body in sorted(ChainMap(*map(vars, [thing, *bases])).items()):
            if not method.startswith("_") and inspect.isfunction(body):
                lines.append(f"  .{method}({names_of(inspect.signature(body))})")
    return lines


def page_now() -> str:
    block = "\n".join(line for name in sorted(reference.API) for line in signatures(name)) + "\n"
    return re.sub(MARKS, lambda mark: mark[1] + block + mark[2], PAGE.read_text())


def test_signatures_are_those_of_the_page() -> None:
    assert page_now() == PAGE.read_text(), "run python -m tests.documents.test_public_api, and announce it"


if __name__ == "__main__":
    PAGE.write_text(page_now())
