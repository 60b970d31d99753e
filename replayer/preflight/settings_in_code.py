"""Rules for settings that a script makes in code: too late, or against deterministic mode."""

import ast
from collections.abc import Iterator

from areal_core.environment import DETERMINISTIC
from replayer.preflight.source_files import Hit, Source

BAD_VALUES = {"torch.backends.cudnn.benchmark": True, "torch.backends.cudnn.deterministic": False}


def settings_in_code(source: Source) -> Iterator[Hit]:
    """Find late environment variables, and calls that leave deterministic mode."""
    for node in source.nodes:
        match node:
            case ast.Assign(targets=[ast.Subscript(value=place, slice=ast.Constant(value=name))]) if (
                name in DETERMINISTIC and source.dotted(place) == "os.environ"
            ):
                seen = f"sets {name} after Python has started"
                yield Hit(node, "environment", "problem", seen, "export it before Python starts")
            case ast.Assign(targets=[ast.Attribute() as place], value=ast.Constant(value=value)) if (
                isinstance(value, bool) and BAD_VALUES.get(source.dotted(place)) is value
            ):
                seen = f"sets {source.dotted(place)} to {value}"
                yield Hit(node, "mode", "problem", seen, "remove it")
    for call in source.calls:
        if source.name_of(call).rpartition(".")[2] != "use_deterministic_algorithms":
            continue
        if any(word.arg == "warn_only" and is_constant(word.value, True) for word in call.keywords):
            yield Hit(call, "mode", "problem", "sets warn_only=True", "remove it: operations would only warn")
        elif call.args and is_constant(call.args[0], False):
            yield Hit(call, "mode", "problem", "leaves deterministic mode", "remove it")


def is_constant(node: ast.AST, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value
