"""Rules for random numbers and times: unseeded generators, and clocks and ids that reach data."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from replayer.preflight.source_files import Hit, Source, words

RANDOM = words(
    "random randint randrange uniform shuffle choice choices sample gauss normalvariate triangular expovariate "
    "betavariate lognormvariate getrandbits randbytes"
)
NUMPY = words(
    "rand randn randint random random_sample ranf sample choice shuffle permutation normal uniform standard_normal "
    "binomial poisson exponential beta gamma bytes"
)
TORCH = words(
    "rand randn randint randperm normal bernoulli multinomial rand_like randn_like randint_like poisson"
)
# library -> calls that seed its global generator
SEEDERS = {
    "random": ("random.seed",),
    "numpy": ("numpy.random.seed",),
    "torch": ("torch.manual_seed", "torch.random.manual_seed", "torch.cuda.manual_seed_all"),
}
SEEDS_ALL = ("seed_everything", "set_seed", "seed_all", "enable_full_determinism")
# Generators that take a seed; without one they read it from the system.
GENERATORS = (
    "random.Random",
    "numpy.random.default_rng",
    "numpy.random.RandomState",
    "numpy.random.SeedSequence",
    "numpy.random.PCG64",
    "numpy.random.MT19937",
    "numpy.random.Philox",
)
FROM_SYSTEM = (
    "random.SystemRandom",
    "torch.seed",
    "torch.random.seed",
    "secrets.SystemRandom",
    "os.getrandom",
)
SECRETS = ("secrets.choice", "secrets.randbelow", "secrets.randbits")
CLOCKS = words(
    "time.time time.time_ns time.monotonic time.monotonic_ns time.perf_counter time.perf_counter_ns time.process_time "
    "time.strftime time.ctime time.localtime time.gmtime datetime.datetime.now datetime.datetime.utcnow "
    "datetime.datetime.today datetime.date.today"
)
NAMES = words(
    "uuid.uuid1 uuid.uuid4 os.urandom secrets.token_hex secrets.token_bytes secrets.token_urlsafe os.getpid "
    "threading.get_ident tempfile.mktemp id"
)
ARRAYS = words("torch.tensor torch.as_tensor torch.full torch.full_like numpy.array numpy.asarray numpy.full")
DATA_KEYS = words(
    "prompt prompts content messages question answer text input inputs input_ids reward rewards score label labels "
    "seed"
)
CHOICE = "a choice"
SORTS = ("sorted", "sort", "min", "max")
IN_WORKERS = (
    "submit",
    "map",
    "imap",
    "imap_unordered",
    "starmap",
    "apply_async",
    "run_in_executor",
    "to_thread",
)


@dataclass(frozen=True)
class Seeded:
    """Libraries whose global generator the files of a group seed."""

    libraries: frozenset[str] = frozenset()

    def __or__(self, other: "Seeded") -> "Seeded":
        return Seeded(self.libraries | other.libraries)


def seeded_libraries(source: Source) -> Seeded:
    found: set[str] = set()
    for call in source.calls:
        name = source.name_of(call)
        if not call.args and not call.keywords:
            continue
        if name.rpartition(".")[2] in SEEDS_ALL:
            found |= SEEDERS.keys()
        found |= {library for library, seeders in SEEDERS.items() if name in seeders}
    return Seeded(frozenset(found))


def random_numbers(source: Source, seeded: Seeded) -> Iterator[Hit]:
    """Find random numbers that no seed determines, and clocks and ids that reach data."""
    workers = worker_functions(source)
    for call in source.calls:
        name = source.name_of(call)
        last = name.rpartition(".")[2]
        if name in FROM_SYSTEM or name in SECRETS:
            yield Hit(
                call, "random", "problem", f"{name}() takes its numbers from the system", use_seeded(name)
            )
        elif (name in GENERATORS or name in SEEDERS["random"] + SEEDERS["numpy"]) and is_unseeded(call):
            yield Hit(
                call, "random", "problem", f"{last}() without a seed", f"give {last}() a seed of the config"
            )
        elif (library := global_generator(name, call)) is not None:
            function = source.function_of(call)
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and function.name in workers:
                seen = f"{name}() draws in a worker or thread: which one draws first varies"
                yield Hit(call, "random", "problem", seen, use_seeded(name))
            elif library not in seeded.libraries:
                seen = f"{name}() draws from the global generator, which nothing here seeds"
                yield Hit(call, "random", "problem", seen, use_seeded(name))
    yield from values_in_data(source)


def use_seeded(name: str) -> str:
    if name.startswith("torch."):
        return "pass generator=torch.Generator().manual_seed(...)"
    if name.startswith("numpy."):
        return "draw from np.random.default_rng([seed, step])"
    return "draw from random.Random(seed)"


def is_unseeded(call: ast.Call) -> bool:
    """Return whether a generator is made without a seed, or with None."""
    values = [*call.args, *(keyword.value for keyword in call.keywords)]
    return not values or (isinstance(values[0], ast.Constant) and values[0].value is None)


def global_generator(name: str, call: ast.Call) -> str | None:
    head, _, last = name.rpartition(".")
    if head == "random" and last in RANDOM:
        return "random"
    if head == "numpy.random" and last in NUMPY:
        return "numpy"
    if head == "torch" and last in TORCH and not any(word.arg == "generator" for word in call.keywords):
        return "torch"
    return None


def worker_functions(source: Source) -> set[str]:
    found: set[str] = set()
    for call in source.calls:
        is_method = isinstance(call.func, ast.Attribute) and call.func.attr in IN_WORKERS
        values: list[ast.expr] = [*call.args[:2]] if is_method else []
        if source.name_of(call).rpartition(".")[2] in ("Thread", "Process"):
            values += [word.value for word in call.keywords if word.arg == "target"]
        found |= {value.id for value in values if isinstance(value, ast.Name)}
    return found


def values_in_data(source: Source) -> Iterator[Hit]:
    """Find clocks and ids that reach a seed, a tensor, a text of the data, a reward or an order."""
    for scope, own in source.scopes.items():
        origins = {
            node: source.name_of(node)
            for node in own
            if isinstance(node, ast.Call) and is_origin(source, node)
        }
        if not origins:
            continue
        tainted = tainted_names(own, origins)
        seen: set[ast.AST] = set()
        for node in own:
            for value, where in sinks(source, scope, node):
                origin = origin_in(value, origins, tainted)
                if origin is None or origin in seen or (where == CHOICE and origins[origin] == "id"):
                    continue  # a dict by identity
                seen.add(origin)
                check = "time" if origins[origin] in CLOCKS else "random"
                what = f"{origins[origin]}() reaches {where}"
                yield Hit(origin, check, "problem", what, "compute it from the seed, the step or the sample")


def is_origin(source: Source, call: ast.Call) -> bool:
    name = source.name_of(call)
    return name in CLOCKS or name in NAMES


def tainted_names(own: Sequence[ast.AST], origins: dict[ast.Call, str]) -> dict[str, ast.Call]:
    tainted: dict[str, ast.Call] = {}
    while True:
        size = len(tainted)
        for node in own:
            if (
                not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr)
                or node.value is None
            ):
                continue
            if (origin := origin_in(node.value, origins, tainted)) is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [
                    inner.id
                    for target in targets
                    for inner in ast.walk(target)
                    if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
                ]
                for name in names:
                    tainted.setdefault(name, origin)
        if len(tainted) == size:
            return tainted


def origin_in(value: ast.AST, origins: dict[ast.Call, str], tainted: dict[str, ast.Call]) -> ast.Call | None:
    for node in ast.walk(value):
        if isinstance(node, ast.Call) and node in origins:
            return node
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in tainted:
            return tainted[node.id]
    return None


def sinks(source: Source, scope: ast.AST, node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield the expressions of a node that become data, and what they become."""
    if isinstance(node, ast.Call):
        name = source.name_of(node)
        last = name.rpartition(".")[2] or getattr(node.func, "attr", "")
        seeders = [seeder for seeders in SEEDERS.values() for seeder in seeders]
        values: list[ast.AST] = [*node.args, *(word.value for word in node.keywords)]
        if name in GENERATORS or name in seeders or last in (*SEEDS_ALL, "manual_seed", "seed"):
            yield from ((value, "a seed") for value in values)
        elif name in ARRAYS:
            yield from ((value, "a tensor") for value in values)
        elif name == "int.from_bytes":
            yield from ((value, "a number") for value in values)
        if last in SORTS:
            yield from ((word.value, "an order") for word in node.keywords if word.arg == "key")
        yield from (
            (word.value, f"the data as {word.arg!r}") for word in node.keywords if word.arg in DATA_KEYS
        )
    elif isinstance(node, ast.Dict):
        for key, item in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and key.value in DATA_KEYS:
                yield item, f"the data as {key.value!r}"
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        key = node.targets[0].slice
        if isinstance(key, ast.Constant) and key.value in DATA_KEYS:
            yield node.value, f"the data as {key.value!r}"
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        yield node.slice, CHOICE
    elif isinstance(node, ast.Return) and node.value is not None and computes_data(source, scope):
        yield node.value, "a reward"


def computes_data(source: Source, scope: ast.AST) -> bool:
    name = getattr(scope, "name", "")
    return "reward" in name or name.startswith("score") or (source.is_data and not name.startswith("_"))
