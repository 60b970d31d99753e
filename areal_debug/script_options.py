"""Which options a training script has, read from its text: nothing of a user's is run before the run itself."""

import ast
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Any

from areal_core.config import DPOConfig, GRPOConfig, PPOConfig, RWConfig, SFTConfig

LOADERS = ("load_expr_config", "wire")
METHODS: dict[str, type[Any]] = {
    "GRPOConfig": GRPOConfig,
    "PPOConfig": PPOConfig,
    "SFTConfig": SFTConfig,
    "RWConfig": RWConfig,
    "DPOConfig": DPOConfig,
}


def options_of_script(text: str) -> type[Any] | None:
    """The class that the script gives to `load_expr_config` or `wire`; None where that cannot be told.

    Of a class that the script itself derives from one of ours, the fields that it adds are options without a type.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return None  # which the run will tell with its place
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    wanted = next((name for call in ast.walk(tree) if (name := loaded_class(call)) is not None), None)
    own: list[str] = []
    while wanted in classes:
        node = classes.pop(wanted)
        own += [
            item.target.id
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        ]
        wanted = next((last_name(base) for base in node.bases), None)
    if wanted not in METHODS:
        return None
    method = METHODS[wanted]
    if not own:
        return method
    return make_dataclass(
        method.__name__, [(name, Any, field(default=None)) for name in own], bases=(method,)
    )


def loaded_class(node: ast.AST) -> str | None:
    """`X` of a call `load_expr_config(arguments, X)`."""
    if isinstance(node, ast.Call) and last_name(node.func) in LOADERS and len(node.args) == 2:
        return last_name(node.args[1])
    return None


def last_name(node: ast.expr) -> str | None:
    """`c` of `a.b.c`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def read_options(script: Path) -> type[Any] | None:
    """`options_of_script` of a file."""
    return options_of_script(script.read_text(encoding="utf-8", errors="replace"))
