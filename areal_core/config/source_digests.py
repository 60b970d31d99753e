"""Digests of a Python file: as a whole, by function, and of the files beside it that it imports.

Of two versions, they name the function that differs. Nothing is imported, nor copied.
"""

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OF_MODULE = "(module)"  # what is in no function
Function = ast.FunctionDef | ast.AsyncFunctionDef


def digests(file: Path) -> dict[str, Any]:
    text = file.read_bytes()
    uses = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(imported_beside(file))
    }
    return {"sha256": hashlib.sha256(text).hexdigest(), "functions": digests_of_functions(text), "uses": uses}


def digests_of_functions(text: bytes) -> dict[str, dict[str, Any]]:
    """Return line and sha256 of each function and method, and of what is outside of them.

    `names` are the functions of the file that each names: what it may call.
    """
    lines, tree = text.splitlines(), parsed(text)
    nodes = dict(functions_in(tree))
    named_by: dict[str, list[str]] = {}
    for name in nodes:
        for part in name.split("."):
            named_by.setdefault(part, []).append(name)
    found, rest = {}, dict(enumerate(lines, 1))
    for name, node in nodes.items():
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        last = node.end_lineno or first
        found[name] = {
            "line": first,
            "sha256": sha256(lines[first - 1 : last]),
            "names": names_in(node, named_by),
        }
        for number in range(first, last + 1):
            rest.pop(number, None)
    outside = [line for line in rest.values() if line.strip() and not line.lstrip().startswith(b"#")]
    around = [node for node in tree.body if not isinstance(node, Function | ast.ClassDef)]
    names = names_in(ast.Module(around, []), named_by)
    return found | {OF_MODULE: {"line": 1, "sha256": sha256(outside), "names": names}}


def sha256(lines: list[bytes]) -> str:
    return hashlib.sha256(b"\n".join(lines)).hexdigest()


def names_in(node: ast.AST, named_by: dict[str, list[str]]) -> list[str]:
    words = {part.id if isinstance(part, ast.Name) else part.attr
             for part in ast.walk(node) if isinstance(part, ast.Name | ast.Attribute)}  # fmt: skip
    return sorted({name for word in words & named_by.keys() for name in named_by[word]})


def functions_in(tree: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, Function]]:
    for node in tree.body:
        if isinstance(node, Function):
            yield f"{prefix}{node.name}", node
        elif isinstance(node, ast.ClassDef):
            yield from functions_in(node, f"{prefix}{node.name}.")


def parsed(text: bytes) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def imported_beside(file: Path) -> set[Path]:
    """Return the files in its folder that a file imports, and those that they import."""
    found, waiting = {file}, [file]
    while waiting:
        nodes = [
            node
            for node in ast.walk(parsed(waiting.pop().read_bytes()))
            if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        names = {alias.name for node in nodes for alias in node.names}
        names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        new = {path for name in names if (path := file.parent / f"{name.split('.')[-1]}.py").is_file()}
        waiting += new - found
        found |= new
    return found - {file}
