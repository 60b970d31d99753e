"""Expressions such as `reward > 0 and len(completion) < 512`, evaluated by a safe subset.

Python's own parser builds the tree; only the nodes below are accepted, and functions of ours evaluate them.
There is no `eval`, no attribute access and no call except of six functions, so an expression from
an untrusted source can do nothing but be true or false. Its length, depth, operations and numbers
are bounded: it takes time and memory as its row has, and no more.
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from replayer.errors import WrongFilter

# Names that a filter may use; `prompt` and `completion` are token ids.
ROW_NAMES = (
    "reward",
    "prompt",
    "completion",
    "prompt_text",
    "completion_text",
    "finish_reason",
    "logprobs",
    "versions",
    "prompt_id",
    "sample_id",
    "step",
)
MAX_CHARACTERS = 2000
MAX_NODES = 1000  # of Python's tree: names, constants, operators and their contexts
MAX_DEPTH = 50
MAX_INTEGER = 10**30  # of constants and results
MAX_DIGITS = 30  # of round


def total(values: list[float]) -> float:
    """Add numbers; `sum` with a start value would join lists."""
    return sum(values)


def rounded(value: float, digits: int = 0) -> float:
    """Round to at most 30 digits: `round(5, -10**8)` computes a power of ten of that size first."""
    if abs(digits) > MAX_DIGITS:
        raise ValueError(f"round takes at most {MAX_DIGITS} digits")
    return round(value, digits) if digits else round(value)


@dataclass(frozen=True)
class Kind:
    """What follows `is`: true of a list if it is of some, or of every one of its numbers."""

    name: str
    of_number: Callable[[float], bool]
    of_list: Callable[..., bool]

    def of(self, value: Any) -> bool:
        """Return whether a number or a list is of this kind. Raises TypeError for other values."""
        numbers = value if isinstance(value, list) else [value]
        if not all(isinstance(number, int | float) for number in numbers):
            raise TypeError(f"only numbers are {self.name}, or not")
        return self.of_list(map(self.of_number, numbers))


KINDS = {
    kind.name: kind
    for kind in (
        Kind("nan", math.isnan, any),
        Kind("inf", math.isinf, any),
        Kind("finite", math.isfinite, all),
    )
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "len": len,
    "min": min,
    "max": max,
    "sum": total,
    "abs": abs,
    "round": rounded,
}
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}
ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
Evaluate = Callable[[Mapping[str, Any]], Any]  # of a row's values by name
UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.Not: operator.not_, ast.USub: operator.neg}


@dataclass(frozen=True)
class Expression:
    """A parsed expression, the value of an option of the command line."""

    text: str
    tree: ast.expr
    evaluate: Evaluate
    option: str

    def uses(self, name: str) -> bool:
        return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(self.tree))

    def matches(self, values: Mapping[str, Any]) -> bool:
        """Return whether the row, or whatever it is about, with these values satisfies it.

        Raises WrongFilter if the values do not fit the operators.
        """
        try:
            return bool(self.evaluate(values))
        except (TypeError, ArithmeticError, ValueError, IndexError) as error:
            raise WrongFilter(f"{self.option} {self.text!r} cannot be evaluated: {error}") from None


def parse_expression(text: str, names: tuple[str, ...], option: str = "--filter") -> Expression:
    """Parse an expression of comparisons, logic, arithmetic and the allowed functions and names.

    Raises:
        WrongFilter: names what is not allowed, and lists what is; or the limit that is exceeded.
    """
    if len(text) > MAX_CHARACTERS:
        raise WrongFilter(f"{option} has {len(text):,} characters; at most {MAX_CHARACTERS:,} are allowed")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise WrongFilter(f"{option} {text!r} is not an expression: {str(error).splitlines()[0]}") from None
    except (RecursionError, MemoryError):  # of Python's parser
        raise WrongFilter(f"{option} is nested deeper than {MAX_DEPTH} levels") from None
    check_size(tree, option)
    return Expression(text, tree, compiled(tree, names, f"{option} {text!r}"), option)


def check_size(tree: ast.expr, option: str) -> None:
    """Raise WrongFilter for a tree that is too deep or has too many nodes."""
    level: list[ast.AST] = [tree]
    num_nodes = depth = 0
    while level:
        num_nodes, depth = num_nodes + len(level), depth + 1
        if num_nodes > MAX_NODES:
            raise WrongFilter(f"{option} has more than {MAX_NODES:,} names, constants and operations")
        if depth > MAX_DEPTH:
            raise WrongFilter(f"{option} is nested deeper than {MAX_DEPTH} levels")
        level = [child for node in level for child in ast.iter_child_nodes(node)]


def compiled(node: ast.expr, names: tuple[str, ...], shown: str) -> Evaluate:
    """Return what evaluates an allowed node. Raises WrongFilter for the first that is not allowed."""

    def part(one: ast.expr) -> Evaluate:
        return compiled(one, names, shown)

    match node:
        case ast.Constant(value=int() as value) if abs(value) > MAX_INTEGER:
            raise WrongFilter(f"{shown} has a number beyond {MAX_INTEGER:.0e}")
        case ast.Constant(value=bool() | int() | float() | str() as value):
            return lambda values: value
        case ast.Name(id=name) if name in names:
            return lambda values: values[name]
        case ast.Name(id=name):
            raise WrongFilter(f"{shown}: there is no {name!r}; it may use {', '.join(names)}")
        case ast.BoolOp(op=op, values=operands):
            joined, parts = all if isinstance(op, ast.And) else any, list(map(part, operands))
            return lambda values: joined(one(values) for one in parts)
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            parts = list(map(part, elements))
            return lambda values: [one(values) for one in parts]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in UNARY:
            unary, inner = UNARY[type(op)], part(operand)
            return lambda values: unary(inner(values))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
            binary, one, other = ARITHMETIC[type(op)], part(left), part(right)
            return lambda values: bounded(binary, one(values), other(values))
        case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot() as op], comparators=[ast.Name(id=name)]) if (
            name in KINDS
        ):
            kind, inner, is_wanted = KINDS[name], part(left), isinstance(op, ast.Is)
            return lambda values: kind.of(inner(values)) == is_wanted
        case ast.Compare(left=left, ops=ops, comparators=rest) if all(type(o) in COMPARISONS for o in ops):
            tests, parts = [COMPARISONS[type(op)] for op in ops], list(map(part, (left, *rest)))
            return lambda values: all(
                test(a, b)
                for test, (a, b) in zip(tests, pairwise([one(values) for one in parts]), strict=True)
            )
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
            function, parts = FUNCTIONS[name], list(map(part, args))
            return lambda values: function(*(one(values) for one in parts))
        case ast.Subscript(value=value, slice=index) if not isinstance(index, ast.Slice):
            inner, at = part(value), part(index)
            return lambda values: inner(values)[at(values)]
    raise WrongFilter(
        f"{shown}: {ast.unparse(node)!r} is not allowed; use comparisons, is nan, is inf, is finite, and, or, not, + - * / // %, "
        f"{', '.join(FUNCTIONS)} over {', '.join(names)}"
    )


def bounded(operation: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """Apply arithmetic to numbers only, `'a' * 10**9` would be a string of a gigabyte, and only as
    long as integers are bounded.
    """
    if not isinstance(left, int | float) or not isinstance(right, int | float):
        raise TypeError("arithmetic works on numbers")
    result = operation(left, right)
    if isinstance(result, int) and abs(result) > MAX_INTEGER:
        raise ValueError(f"a result is beyond {MAX_INTEGER:.0e}")
    return result
