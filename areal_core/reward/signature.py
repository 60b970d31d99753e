"""Signatures of reward functions, checked before a run starts and without importing their modules.

A reward function is called as `f(prompt, completions, prompt_ids, completion_ids, **row)`.
"""

import ast
import inspect
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from areal_core.config.import_paths import split_path
from areal_core.errors import RewardError
from areal_core.reward.functions import RewardFn

TEXTS_AND_TOKENS = ("prompt", "completions", "prompt_ids", "completion_ids")
EXAMPLE = "def {name}(prompt, completions, prompt_ids, completion_ids, answer, **row) -> float"
KEYWORD = inspect.Parameter.KEYWORD_ONLY
POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD


def check_reward_fn(
    reward_fn: str | RewardFn, folders: Iterable[str | Path], takes_row: bool, columns: Collection[str] = ()
) -> None:
    """Check the signature of a function, or of a named one whose source is below `folders`.

    Args:
        takes_row: the fields of the dataset's row are passed, `messages` among them.
        columns: of the rows, where they are known.

    Raises:
        RewardError: it cannot be called; with the right signature.
    """
    if isinstance(reward_fn, str):
        if (found := signature_in_source(reward_fn, folders)) is not None:
            check_signature(
                split_path(reward_fn, "reward function", RewardError)[1], found, takes_row, columns
            )
    else:
        check_signature(reward_fn.__name__, inspect.signature(reward_fn), takes_row)


def check_columns(name: str, signature: inspect.Signature, columns: Collection[str]) -> None:
    """Raise RewardError if a function needs an argument that is no column of the rows."""
    given = {*TEXTS_AND_TOKENS, *columns}
    for parameter in signature.parameters.values():
        is_needed = parameter.default is parameter.empty and parameter.kind in (POSITIONAL, KEYWORD)
        if is_needed and parameter.name not in given:
            raise RewardError(
                f"reward function {name} needs {parameter.name!r}, which is no column of the dataset: its "
                f"rows have {', '.join(sorted(columns))}; rename a column or the argument"
            )


def check_signature(
    name: str, signature: inspect.Signature, takes_row: bool, columns: Collection[str] = ()
) -> None:
    """Raise RewardError if a function of this signature cannot be called as one."""
    row = {"messages": None} if takes_row else {}
    try:
        signature.bind_partial(*TEXTS_AND_TOKENS, **row)
    except TypeError as error:
        raise RewardError(wrong_call(name, signature, str(error))) from None
    if columns and takes_row:
        check_columns(name, signature, columns)


def wrong_call(name: str, signature: inspect.Signature, reason: str) -> str:
    return (
        f"reward function {name}{signature} is called with {', '.join(TEXTS_AND_TOKENS)} and the fields of the row "
        f"by name ({reason}): define it as\n    {EXAMPLE.format(name=name)}"
    )


def signature_in_source(name: str, folders: Iterable[str | Path]) -> inspect.Signature | None:
    place, function = split_path(name, "reward function", RewardError)
    file = place if place.endswith(".py") else place.replace(".", "/") + ".py"
    for folder in folders:
        path = Path(folder, file)
        if path.is_file():
            return signature_in_text(path.read_text(encoding="utf-8", errors="replace"), function)
    return None


def signature_in_text(text: str, function: str) -> inspect.Signature | None:
    """Return the signature of a top-level function of a module's text.

    None if there is none, or if a decorator may have changed it.
    """
    try:
        nodes = ast.parse(text).body
    except SyntaxError:  # the run reports it with its line
        return None
    found = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == function]
    return signature_of(found[-1].args) if found and not found[-1].decorator_list else None


def signature_of(arguments: ast.arguments) -> inspect.Signature:
    """Return the parameters of a function's definition; None stands for each default."""
    plain = [*arguments.posonlyargs, *arguments.args]
    has_default = [False] * (len(plain) - len(arguments.defaults)) + [True] * len(arguments.defaults)
    parameters = [parameter(*one, POSITIONAL) for one in zip(plain, has_default, strict=True)]
    if arguments.vararg:
        parameters.append(inspect.Parameter(arguments.vararg.arg, inspect.Parameter.VAR_POSITIONAL))
    of_names = zip(arguments.kwonlyargs, (one is not None for one in arguments.kw_defaults), strict=True)
    parameters += [parameter(*one, KEYWORD) for one in of_names]
    if arguments.kwarg:
        parameters.append(inspect.Parameter(arguments.kwarg.arg, inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(parameters)


def parameter(item: ast.arg, has_default: bool, kind: Any) -> inspect.Parameter:
    return inspect.Parameter(item.arg, kind, default=None if has_default else inspect.Parameter.empty)
