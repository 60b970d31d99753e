"""Rules for orders that vary: sets, hashes of text, directory listings, completion of threads."""

import ast
from collections.abc import Iterator

from replayer.preflight.source_files import Hit, Source, words

LISTINGS = ("listdir", "scandir", "walk", "glob", "iglob", "iterdir", "rglob")
LISTING_MODULES = ("os", "glob")
# Their result does not depend on the order of their argument.
ORDER_FREE = words("sorted len set frozenset min max any all bool Counter sum update difference union")
TO_SEQUENCE = words("list tuple iter map join array tensor extend chain islice")
NUMBERS = ("enumerate", "zip")  # members by their places
SET_METHODS = words("union intersection difference symmetric_difference")
COMPLETION = ("concurrent.futures.as_completed", "asyncio.as_completed")
COLLECTS = ("append", "extend", "put", "put_nowait", "write", "add_row")
HASH_ADVICE = "sort it; deterministic mode fixes PYTHONHASHSEED, other runs do not"


def orders_that_vary(source: Source) -> Iterator[Hit]:
    """Find orders that follow the file system, the hash seed, or which thread is first."""
    yield from listings(source)
    yield from sets(source)
    yield from hashes(source)
    yield from completions(source)


def listings(source: Source) -> Iterator[Hit]:
    """Find listings in the order of the file system, unless they are sorted or only counted."""
    for call in source.calls:
        name = source.name_of(call)
        last = name.rpartition(".")[2] or getattr(call.func, "attr", "")
        head = name.rpartition(".")[0]
        if last not in LISTINGS or (last in ("walk", "listdir", "scandir") and head.split(".")[0] != "os"):
            continue
        if head.split(".")[0] in source.imported.values() and head.split(".")[0] not in (
            *LISTING_MODULES,
            "pathlib",
        ):
            continue  # such as ast.walk
        if is_order_free(source, call):
            continue
        seen = f"{last}() lists in the order of the file system"
        yield Hit(call, "order", "note", seen, f"write sorted({ast.unparse(call)})")


def sets(source: Source) -> Iterator[Hit]:
    """Find loops over sets, and sequences made of them."""
    for own in source.scopes.values():
        names = set_names(own)
        for node in own:
            iterated: ast.expr | None = None
            if isinstance(node, ast.For | ast.AsyncFor) and not has_order_free_body(node):
                iterated = node.iter
            elif (isinstance(node, ast.ListComp) and not is_order_free(source, node)) or (
                isinstance(node, ast.GeneratorExp) and not is_order_free(source, node)
            ):
                iterated = node.generators[0].iter
            elif isinstance(node, ast.Call) and node.args:
                last = source.name_of(node).rpartition(".")[2] or getattr(node.func, "attr", "")
                makes_sequence = last in TO_SEQUENCE and not is_order_free(source, node)
                iterated = node.args[0] if makes_sequence or last in NUMBERS else None
            elif isinstance(node, ast.Starred) and isinstance(node.ctx, ast.Load):
                inside = source.parents[node]
                is_ordered = isinstance(inside, ast.List | ast.Tuple) and not is_order_free(source, inside)
                iterated = node.value if is_ordered else None
            if isinstance(node, ast.expr | ast.stmt) and iterated is not None and is_set(iterated, names):
                seen = f"the order of the set {shortened(iterated)} follows the hashes of its members"
                yield Hit(node, "order", "note", seen, HASH_ADVICE)


def shortened(node: ast.AST) -> str:
    """Write an expression in few characters."""
    text = ast.unparse(node)
    return text if len(text) <= 40 else text[:37] + "..."


def set_names(own: list[ast.AST]) -> set[str]:
    sets_of: set[str] = set()
    others: set[str] = set()
    for _ in range(2):  # names by way of names
        for node in own:
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                target, value = node.targets[0], node.value
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                target, value = node.target, node.value
            else:
                continue
            if isinstance(target, ast.Name | ast.Attribute):
                (sets_of if is_set(value, sets_of) else others).add(ast.unparse(target))
    return sets_of - others


def is_set(node: ast.AST, names: set[str]) -> bool:
    """Return whether an expression is a set, as far as its form shows."""
    if isinstance(node, ast.Set | ast.SetComp):
        return True
    if isinstance(node, ast.Name | ast.Attribute):
        return ast.unparse(node) in names
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name):
            return node.func.id in ("set", "frozenset")
        return (
            isinstance(node.func, ast.Attribute)
            and node.func.attr in SET_METHODS
            and is_set(node.func.value, names)
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr | ast.Sub | ast.BitXor):
        return any(is_set(side, names) or is_keys(side) for side in (node.left, node.right))
    return False


def is_keys(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "keys"


def is_order_free(source: Source, node: ast.AST) -> bool:
    for above in source.above(node):
        if isinstance(above, ast.Call):
            last = source.name_of(above).rpartition(".")[2] or getattr(above.func, "attr", "")
            if last in ORDER_FREE:
                return True
        if isinstance(above, ast.SetComp | ast.DictComp | ast.Compare | ast.Set):
            return True
        if isinstance(above, ast.For) and node is above.iter:
            return has_order_free_body(above)
        if isinstance(above, ast.Assign) and (has_one_target(above) or is_sorted_later(source, above)):
            return True
        if isinstance(above, ast.stmt):
            return False
    return False


def has_one_target(assigned: ast.Assign) -> bool:
    """Return whether an assignment takes apart a sequence of one: `(file,) = folder.glob("*")`."""
    return isinstance(assigned.targets[0], ast.Tuple) and len(assigned.targets[0].elts) == 1


def is_sorted_later(source: Source, assigned: ast.Assign) -> bool:
    names = {ast.unparse(target) for target in assigned.targets}
    for node in source.scopes[source.function_of(assigned)]:
        match node:
            case ast.Call(func=ast.Attribute(value=value, attr="sort")) if ast.unparse(value) in names:
                return True
            case ast.Call(func=ast.Name(id="sorted" | "min" | "max"), args=[value, *_]) if (
                ast.unparse(value) in names
            ):
                return True
    return False


def has_order_free_body(loop: ast.For | ast.AsyncFor) -> bool:
    return all(is_order_free_statement(statement) for statement in loop.body)


def is_order_free_statement(statement: ast.stmt) -> bool:
    """Return whether a statement of a loop has the same effect in any order of its passes."""
    if isinstance(statement, ast.If | ast.For):
        return all(is_order_free_statement(inner) for inner in (*statement.body, *statement.orelse))
    if isinstance(statement, ast.With | ast.Try):
        return all(is_order_free_statement(inner) for inner in statement.body)
    if isinstance(statement, ast.Raise | ast.Assert | ast.Continue | ast.Pass | ast.Delete):
        return True
    if isinstance(statement, ast.Assign):
        read = {node.id for node in ast.walk(statement.value) if isinstance(node, ast.Name)}
        return all(
            isinstance(target, ast.Subscript) or (isinstance(target, ast.Name) and target.id not in read)
            for target in statement.targets
        )
    return isinstance(statement, ast.Expr) and acts_alone(statement.value)


def acts_alone(node: ast.expr) -> bool:
    if isinstance(node, ast.IfExp):
        return acts_alone(node.body) and acts_alone(node.orelse)
    call = node.value if isinstance(node, ast.Await) else node
    return (
        isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr not in COLLECTS
    )


def hashes(source: Source) -> Iterator[Hit]:
    """Find hash() outside of `__hash__`: of texts it follows the hash seed."""
    for call in source.calls:
        is_builtin = (
            isinstance(call.func, ast.Name) and call.func.id == "hash" and "hash" not in source.imported
        )
        if is_builtin and getattr(source.function_of(call), "name", "") != "__hash__":
            seen = f"{shortened(call)}: hashes of texts follow PYTHONHASHSEED"
            yield Hit(call, "hash", "note", seen, "use zlib.crc32 or hashlib of the bytes")


def completions(source: Source) -> Iterator[Hit]:
    """Find results that are collected in the order in which threads or processes finish."""
    for call in source.calls:
        name = source.name_of(call)
        last = getattr(call.func, "attr", name)
        if last == "imap_unordered":
            yield Hit(
                call, "threads", "problem", "imap_unordered() returns results as they finish", "use imap()"
            )
        elif name in COMPLETION and not is_order_free(source, call):
            loop = next(
                (
                    above
                    for above in source.above(call)
                    if isinstance(above, ast.For | ast.AsyncFor | ast.comprehension)
                ),
                None,
            )
            if isinstance(loop, ast.For | ast.AsyncFor) and has_order_free_body(loop):
                continue
            seen = "as_completed() returns results in the order in which they finish"
            yield Hit(call, "threads", "problem", seen, "collect by index, or read the futures in order")
    yield from shared_lists(source)


def shared_lists(source: Source) -> Iterator[Hit]:
    functions = {node.name: node for node in source.nodes if isinstance(node, ast.FunctionDef)}
    for call in source.calls:
        if source.name_of(call) != "threading.Thread":
            continue
        for word in call.keywords:
            function = (
                functions.get(word.value.id)
                if word.arg == "target" and isinstance(word.value, ast.Name)
                else None
            )
            if function is None:
                continue
            assigned = {
                n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            }
            for node in ast.walk(function):
                match node:
                    case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append" | "extend")) if (
                        name not in assigned
                    ):
                        seen = f"threads fill {name} in the order in which they finish"
                        yield Hit(node, "threads", "problem", seen, "give each thread its own place in it")
