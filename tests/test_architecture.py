"""Layout policies: imports, no circle, budgets, reading lists of ARCHITECTURE.md, no dead code."""

import ast
import importlib
import os
import re
import statistics
import subprocess
import sys
import tomllib
from collections import defaultdict
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from vulture import Vulture

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "areal_core": set(),
    "recorder": set(),
    "hangdoctor": set(),
    "replayer": {"areal_core", "recorder"},
    "consistency": {"areal_core", "recorder"},
    "areal_debug": {"areal_core", "recorder", "replayer", "consistency", "hangdoctor"},
}
SHARED = "areal_core.safety"  # every package may import it; it imports the standard library only
VERBS = sorted(path.stem for path in (ROOT / "areal_debug/verbs").glob("[a-z]*.py"))
HEAVY = ("torch", "transformers", "sglang")
# Imported by a name in a string, or by another package when it is given a URL.
INDIRECT = {"wandb", "trackio", "s3fs", "trl", "bm25s", "openai"}  # the last two: examples
# Hosts of our code with what they bring.
HOSTS = {"pytest", "vllm", "areal", "prime_rl", "skyrl", "accelerate", "transfer_queue"}
MOST_LINES_IN_A_FUNCTION = 80
MEDIAN_LINES_OF_A_FUNCTION = 9
MOST_FILES_OF_A_STEP = 15
LONGEST_LOOP = 150
DEEPEST_LOOP = 3
# File names that occur more than once in a package because they are the same thing for each
# verb, format or subpackage.
ROLES = {
    "__init__",
    "__main__",
    "batch",
    "errors",
    "page",
    "read",
    "render",
    "report",
    "slime",
    "start",
    "wire",
}
# What vulture finds and who uses it.
USED_FROM_OUTSIDE = tomllib.loads(Path(__file__).with_name("used_from_outside.toml").read_text())
# A tar inside of an opened file, methods of other names, pages that we wrote.
READ_IN_ANOTHER_WAY = (
    "tarfile.open(fileobj=file",
    "self.open(",
    "self.answer(HTTPStatus.OK, file.read_bytes()",
)


def modules(package: str) -> list[Path]:
    """Tracked Python files of a package."""
    return sorted(f for f in (ROOT / package).rglob("*.py") if "__pycache__" not in f.parts)


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def parsed(file: Path) -> tuple[list[ast.Import | ast.ImportFrom], list[tuple[str, int]]]:
    """The import statements of a file, functions included, and the name and lines of each function."""
    imports, functions = [], []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.append(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.append((node.name, node.end_lineno - node.lineno + 1))
    return imports, functions


def imported_packages(file: Path) -> set[str]:
    """Top-level packages that a file imports anywhere, functions included; `SHARED` by its name."""
    found = set()
    for node in parsed(file)[0]:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
    return {SHARED if name.startswith(f"{SHARED}.") else name.split(".")[0] for name in found}


@cache
def import_graph() -> dict[str, set[str]]:
    """Map a module to the modules of ours that it imports: at the top, in functions, for types."""
    files = {module_name(file): file for package in MAY_IMPORT for file in modules(package)}
    graph = {}
    for name, file in files.items():
        found: set[str] = set()
        for node in parsed(file)[0]:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                submodules = {f"{node.module}.{alias.name}" for alias in node.names} & set(files)
                found |= submodules or {node.module}
        graph[name] = (found & set(files)) - {name}
    return graph


def circle_from(start: str, graph: dict[str, set[str]]) -> list[str]:
    """A shortest path of imports from a module back to itself; empty if there is none."""
    paths, seen = [[start]], set()
    while paths:
        path = paths.pop(0)
        for target in sorted(graph[path[-1]]):
            if target == start:
                return [*path, start]
            if target not in seen:
                seen.add(target)
                paths.append([*path, target])
    return []


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_package_imports_only_what_lies_below_it(package):
    forbidden = set(MAY_IMPORT) - {package} - MAY_IMPORT[package]
    wrong = {
        f"{file.relative_to(ROOT)} imports {name}"
        for file in modules(package)
        for name in imported_packages(file) & forbidden
    }
    assert wrong == set()


def distributions() -> set[str]:
    """What pyproject.toml requires, for the plain install and for the extras of users."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].items()
    of_users = [one for extra, of in extras if extra not in ("bench", "dev", "docs", "all") for one in of]
    listed = (re.match(r"[A-Za-z0-9._-]+", line)[0] for line in (*project["dependencies"], *of_users))
    return {name.lower().replace("_", "-") for name in listed} - {"areal-debug"}


def packages_of(name: str) -> set[str]:
    """Return the packages of a distribution, or its name where it is not installed."""
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return {name.replace("-", "_")}
    listed = (found.read_text("top_level.txt") or "").split()
    return set(listed) or {file.parts[0].removesuffix(".py") for file in found.files}


def test_what_is_imported_is_declared_and_what_is_declared_is_imported():
    imported = set().union(*(imported_packages(file) for package in MAY_IMPORT for file in modules(package)))
    imported -= {*MAY_IMPORT, SHARED, *HOSTS} | sys.stdlib_module_names
    packages = {name: packages_of(name) for name in distributions()}
    assert imported - set().union(*packages.values()) == set()
    assert {name for name, of in packages.items() if not of & (imported | INDIRECT)} == {
        "py-spy"
    }  # a command


def test_what_all_packages_share_imports_the_standard_library_only():
    allowed = sys.stdlib_module_names | {SHARED}
    assert {file.name: imported_packages(file) - allowed for file in modules("areal_core/safety")} == {
        file.name: set() for file in modules("areal_core/safety")
    }


def test_hangdoctor_never_imports_torch():
    assert not [f for f in modules("hangdoctor") if imported_packages(f) & set(HEAVY)]


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_package_name_resolves_to_ours(package):
    assert Path(importlib.import_module(package).__file__).parent == ROOT / package


# Started on stuck nodes, or where a mistake in a command must be reported at once.
LIGHT = ["recorder", "hangdoctor", "replayer.preconditions", "replayer.request", "areal_core.launch.run"]


def test_light_packages_start_without_heavy_imports():
    """A package that imports none of them after others that import none imports none alone."""
    names = [*LIGHT, *(f"areal_debug.verbs.{verb}" for verb in VERBS)]
    code = f"""
import importlib, sys
for name in {names}:
    importlib.import_module(name)
    print(*(f"{{name}} imports {{heavy}}" for heavy in {HEAVY} if sys.modules.pop(heavy, None)), end="")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""


def test_no_files_import_each_other_in_a_circle():
    graph = import_graph()
    circles = {tuple(sorted(set(circle))) for name in graph if (circle := circle_from(name, graph))}
    assert circles == set()


def test_a_circle_would_be_found():
    assert circle_from("a", {"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]
    assert circle_from("a", {"a": {"b"}, "b": {"c"}, "c": {"b"}}) == []


def folder_of(name: str) -> str:
    """The folder of a package that a module belongs to, or the module itself."""
    file = next(
        f
        for f in (ROOT / Path(*name.split(".")) / "__init__.py", ROOT / f"{name.replace('.', '/')}.py")
        if f.is_file()
    )
    parts = file.relative_to(ROOT).parts
    return "/".join(parts[:2])


def test_no_folders_of_a_package_import_each_other_in_a_circle():
    graph: dict[str, set[str]] = defaultdict(set)
    for name, targets in import_graph().items():
        for target in targets:
            own, other = folder_of(name), folder_of(target)
            if own != other and own.split("/")[0] == other.split("/")[0]:
                graph[own].add(other)
                graph[other] |= set()
    circles = {tuple(sorted(set(circle))) for name in graph if (circle := circle_from(name, graph))}
    assert circles == set()


def budgets() -> dict[str, tuple[int, int]]:
    """Lines and budget of each row of the table in ARCHITECTURE.md."""
    section = (ROOT / "ARCHITECTURE.md").read_text().split("## Budgets\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([a-z_/]+)` \| ([\d,]+) \|", section, re.MULTILINE)
    sizes = {name: sum(file.read_text().count("\n") for file in modules(name)) for name, _ in rows}
    return {folder: (sizes[folder], int(budget.replace(",", ""))) for folder, budget in rows}


def test_every_package_is_within_its_budget_and_has_one():
    found = budgets()
    assert {folder: sizes for folder, sizes in found.items() if sizes[0] > sizes[1]} == {}
    assert {*MAY_IMPORT, "tests", "benchmarks"} <= set(found)


def test_no_function_is_too_long_and_most_are_short():
    too_long, lengths = {}, []
    for package in MAY_IMPORT:
        for file in modules(package):
            for name, lines in parsed(file)[1]:
                lengths.append(lines)
                if lines > (LONGEST_LOOP if name == "train_steps" else MOST_LINES_IN_A_FUNCTION):
                    too_long[f"{file.relative_to(ROOT)}:{name}"] = lines
    assert too_long == {}
    assert statistics.median(lengths) <= MEDIAN_LINES_OF_A_FUNCTION


def test_a_file_name_means_one_thing_in_a_package():
    for package in MAY_IMPORT:
        by_name = defaultdict(list)
        for file in modules(package):
            if file.parent.name != "verbs":  # which has the name of its verb
                by_name[file.stem].append(str(file.relative_to(ROOT)))
        twice = {n: files for n, files in by_name.items() if len(files) > 1 and n not in ROLES}
        assert twice == {}


def test_the_training_loop_is_one_function_of_three_levels():
    tree = ast.parse((ROOT / "areal_core/trainer/rl.py").read_text())
    loop = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "train_steps")

    def depth(node: ast.AST) -> int:
        own = isinstance(node, ast.For | ast.While | ast.With | ast.If | ast.Try)
        return own + max((depth(child) for child in ast.iter_child_nodes(node)), default=0)

    assert depth(loop) <= DEEPEST_LOOP


def reading_lists() -> dict[str, list[str]]:
    """Title to files, in order, of the lists under "Which files to read, in order"."""
    section = (ROOT / "ARCHITECTURE.md").read_text().split("## Which files to read, in order\n")[1]
    lists = {}
    for part in section.split("\n## ")[0].split("\n### ")[1:]:
        lists[part.splitlines()[0]] = re.findall(r"^\d+\. `([^`]+\.py)`", part, re.MULTILINE)
    return lists


@pytest.mark.parametrize("title", reading_lists())
def test_each_file_of_a_reading_list_is_reached_from_another(title):
    """A user's own script is started by its path."""
    files = reading_lists()[title]
    graph = {name: set(targets) for name, targets in import_graph().items()}
    names = [module_name(ROOT / file) for file in files]
    assert [f for f in files if not (ROOT / f).is_file()] == []
    assert len(names) == len(set(names))
    reached = {names[0]}
    for name, file in zip(names, files, strict=True):
        text = (ROOT / file).read_text()
        # `python -m MODULE`, and what a user's script imports.
        reached |= graph.get(name, set()) | {
            n for n in names if f'"{n}"' in text or f"from {n} import" in text
        }
    users = {name for name in names if name.startswith("examples.")}
    unreached = [name for name in names if name not in reached | users]
    assert unreached == []


def test_one_training_step_is_read_in_few_files():
    files = reading_lists()["One training step"]
    assert files[0] == "areal_core/trainer/rl.py"
    assert 10 <= len(files) <= MOST_FILES_OF_A_STEP


def test_one_function_starts_python():
    """`python_command`: `-m` and `-c` would import from the current folder."""
    others = {
        "areal_debug/verbs/consistency.py": "the default of an option",
        "hangdoctor/collect/pyspy.py": "finds and names what is beside it",
        "hangdoctor/collect/ray_nodes.py": "on another machine: BOOTSTRAP drops the current folder",
    }
    files = [file for package in MAY_IMPORT for file in modules(package)]
    named = {str(file.relative_to(ROOT)) for file in files if "sys.executable" in file.read_text()}
    assert named - set(others) == {"areal_core/safety/interpreter.py"}


def test_files_of_others_are_opened_in_one_way():
    """`safety/received.py`; the others read files of ours, or of the user's own command."""
    reads = re.compile(r"(?:\.read_text|\.read_bytes|(?<!os)\.open|(?<![\w.])open)\(")
    ours = re.compile(
        r"__file__|with_suffix|with_name|ASSETS|STYLE|wb\"|\"w\"|opener\(|archive\.open|open_below|devnull|def open"
    )
    folders = "areal_debug/doctor areal_debug/trace areal_debug/open recorder/trainers hangdoctor/parse"
    found = {
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for folder in folders.split()
        for file in modules(folder)
        for line in file.read_text().splitlines()
        if reads.search(line) and not ours.search(line)
    }
    assert {place for place in found if not any(known in place for known in READ_IN_ANOTHER_WAY)} == set()


def test_no_code_is_dead():
    vulture = Vulture(ignore_decorators=["@*.command*", "@*.group*", "@*.result_callback*"])
    vulture.scavenge([str(ROOT / package) for package in MAY_IMPORT])
    found = {
        item.name: f"{os.path.relpath(item.filename, ROOT)}:{item.first_lineno}"
        for item in vulture.get_unused_code(min_confidence=60)
        # Fields of dataclasses and attributes of libraries' objects are data, not code.
        if item.typ not in ("variable", "attribute") or item.confidence == 100
    }
    assert {n: place for n, place in found.items() if n not in USED_FROM_OUTSIDE} == {}
    assert set(USED_FROM_OUTSIDE) - set(found) == set()
