"""The scan of the source: each fault by its line, nothing in clean scripts and in the trainer."""

import shutil
from pathlib import Path

import pytest

from replayer.preflight.scan import scan_sources
from replayer.preflight.source_files import read_source, source_files

ROOT = Path(__file__).parents[2]
HEAD = "import os, random, time, uuid, glob, threading\nimport numpy as np\nimport torch\nfrom pathlib import Path\n"

# one fault each, in the line that ends with `# here`
FAULTS = {
    "random": ("random", "def rows(names):\n    random.shuffle(names)  # here\n    return names\n"),
    "numpy legacy": ("random", "order = np.random.permutation(8)  # here\n"),
    "default_rng": ("random", "from numpy.random import default_rng\nrng = default_rng()  # here\n"),
    "torch": ("random", "noise = torch.randn(4)  # here\n"),
    "secrets": ("random", "import secrets\nrow = secrets.choice([1, 2, 3])  # here\n"),
    "system random": ("random", "from random import SystemRandom\nSystemRandom().shuffle([1, 2])  # here\n"),
    "urandom": ("random", "seed = int.from_bytes(os.urandom(4), 'big')  # here\ntorch.manual_seed(seed)\n"),
    "uuid in data": ("random", "def row(q):\n    return {'prompt': q + str(uuid.uuid4())}  # here\n"),
    "seed of the clock": ("time", "now = time.time()  # here\nseed = int(now) % 1000\nrandom.seed(seed)\n"),
    "date in the prompt": (
        "time",
        "from datetime import datetime\n"
        "def prompt(q):\n"
        "    today = datetime.now().date()  # here\n"
        "    return {'role': 'user', 'content': f'{today}: {q}'}\n",
    ),
    "time in the reward": (
        "time",
        "def speed_reward(prompt, completion):\n"
        "    start = time.perf_counter()  # here\n"
        "    solve(completion)\n"
        "    return 1.0 / (1.0 + time.perf_counter() - start)\n",
    ),
    "set": (
        "order",
        "tags = {row['tag'] for row in rows}\nids = {t: i for i, t in enumerate(tags)}  # here\n",
    ),
    "loop over a set": (
        "order",
        "def unique(texts):\n"
        "    found = set(texts)\n"
        "    kept = []\n"
        "    for text in found:  # here\n"
        "        kept.append(text)\n"
        "    return kept\n",
    ),
    "listing": ("order", "texts = [open(name).read() for name in os.listdir('data')]  # here\n"),
    "glob": ("order", "for file in Path('data').glob('*.jsonl'):  # here\n    load(file)\n"),
    "hash": ("hash", "def split(text):\n    return hash(text) % 10 == 0  # here\n"),
    "completion order": (
        "threads",
        "from concurrent.futures import ThreadPoolExecutor, as_completed\n"
        "def score(rows):\n"
        "    with ThreadPoolExecutor() as pool:\n"
        "        futures = [pool.submit(grade, row) for row in rows]\n"
        "        return [future.result() for future in as_completed(futures)]  # here\n",
    ),
    "threads that append": (
        "threads",
        "done = []\n"
        "def work(row):\n"
        "    done.append(grade(row))  # here\n"
        "threads = [threading.Thread(target=work, args=(row,)) for row in rows]\n",
    ),
    "draws in workers": (
        "random",
        "random.seed(1)\n"
        "def augment(row):\n"
        "    return row + random.random()  # here\n"
        "results = pool.map(augment, rows)\n",
    ),
    "kernel": ("kernel", "sizes = torch.histc(values, bins=10)  # here\n"),
    "atomics": (
        "kernel",
        "import triton.language as tl\ndef add(p, v):\n    tl.atomic_add(p, v)  # here\n",
    ),
    "benchmark": ("mode", "torch.backends.cudnn.benchmark = True  # here\n"),
    "late variable": ("environment", "os.environ['PYTHONHASHSEED'] = '0'  # here\n"),
    "warn_only": ("mode", "torch.use_deterministic_algorithms(True, warn_only=True)  # here\n"),
}
CLEAN = {
    "seeded random": "rng = random.Random(7)\nrng.shuffle(rows)\nrandom.seed(3)\nx = random.random()\n",
    "seeded numpy": "rng = np.random.default_rng([1, 2])\norder = rng.permutation(8)\n",
    "seeded torch": "g = torch.Generator().manual_seed(1)\nx = torch.randperm(8, generator=g)\n",
    "all seeded": "from transformers import set_seed\nset_seed(1)\nx = torch.rand(3) + np.random.rand()\n",
    "timing": "start = time.time()\nrun()\nprint(f'took {time.time() - start:.1f} s')\n",
    "name of a folder": "folder = Path('runs') / f'{time.strftime(\"%Y%m%d\")}-{uuid.uuid4().hex}'\n",
    "timeout": "limit = time.monotonic() + 5\nwhile time.monotonic() < limit:\n    poll()\n",
    "sorted listing": "for file in sorted(Path('data').glob('*.json')):\n    load(file)\n",
    "sorted later": "names = os.listdir('data')\nnames.sort()\nfor name in names:\n    load(name)\n",
    "counted listing": "num_files = len(list(Path('data').iterdir()))\n",
    "removed files": "for file in glob.glob('*.tmp'):\n    os.unlink(file)\n",
    "sorted set": "tags = {r['tag'] for r in rows}\nids = {t: i for i, t in enumerate(sorted(tags))}\n",
    "membership": "seen = set()\nfor row in rows:\n    if row not in seen:\n        seen.add(row)\n        kept.append(row)\n",
    "sets that are checked": "for name in set(a) - set(b):\n    raise ValueError(name)\n",
    "futures in order": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor() as pool:\n"
        "    results = list(pool.map(grade, rows))\n"
    ),
    "futures by index": (
        "from concurrent.futures import as_completed\n"
        "for future in as_completed(futures):\n"
        "    results[futures[future]] = future.result()\n"
    ),
    "own hash": "class Row:\n    def __hash__(self):\n        return hash(self.name)\n",
    "accepted": "port = random.randint(20000, 30000)  # deterministic: a port, not data\n",
    "numpy's own functions": "middle = np.median(x)\ncounts = np.bincount(x)\n",
}


def scanned(file, device="cuda"):
    return [f for f in scan_sources([read_source(file)], device, True) if f.status != "ok"]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_its_line_and_nothing_else(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check, body = FAULTS[name]
    file = tmp_path / "train.py"
    file.write_text(HEAD + body)
    line = next(i for i, text in enumerate(file.read_text().splitlines(), 1) if text.endswith("# here"))
    assert [(f.check, f.file, f.line) for f in scanned(file)] == [(check, "train.py", line)]


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_script_has_no_finding(name, tmp_path):
    file = tmp_path / "train.py"
    file.write_text(HEAD + CLEAN[name])
    assert scanned(file) == []


def test_kernels_are_those_of_cuda_and_replaced_ones_follow_the_mode(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(HEAD + "y = x.index_add(0, rows, values)\nz = torch.histc(x)\n")
    assert scanned(file, "cpu") == []
    found = scan_sources([read_source(file)], "cuda", False)
    assert [f.seen for f in found] == [
        "index_add() uses atomic adds on CUDA",
        "histc() has no deterministic kernel on CUDA (backward included)",
    ]


def test_the_trainer_and_the_examples_are_clean():
    files = [*(ROOT / "areal_core").rglob("*.py"), *(ROOT / "examples").glob("*.py")]
    sources = [read_source(file) for file in sorted(files)]
    assert len(sources) > 190
    found = scan_sources(sources, "cuda", True)
    assert [f"{f.file}:{f.line} {f.seen}" for f in found if f.status != "ok"] == []


def test_a_random_order_inside_the_trainer_is_found(tmp_path):
    folder = tmp_path / "areal_core" / "trainer"
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "areal_core" / "trainer" / "update.py", folder)
    file = folder / "update.py"
    text = file.read_text() + "\n\ndef shuffled(rows):\n    from random import SystemRandom\n\n"
    file.write_text(text + "    SystemRandom().shuffle(rows)\n    return rows\n")
    (found,) = scanned(file)
    assert (found.status, found.line, found.seen) == (
        "problem",
        len(file.read_text().splitlines()) - 1,
        "random.SystemRandom() takes its numbers from the system",
    )


def test_what_a_script_imports_and_names_is_read_and_installed_packages_are_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lib").mkdir()
    files = {
        "train.py": "import numpy, transformers, recorder\nfrom lib import data\nREWARD = 'rewards.py:score'\n",
        "lib/__init__.py": "",
        "lib/data.py": "from . import more\n",
        "lib/more.py": "",
        "rewards.py": "import helper\n",
        "helper.py": "",
        "agent.py": "",
        "other.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    config = {"rollout": {"agent_cls_path": "agent.Solver", "backend": "other.thing"}}
    found = [s for s in source_files(tmp_path / "train.py", config) if s.group != "areal_core"]
    names = {source.shown: source.is_data for source in found}
    assert names == {
        "train.py": False,
        "lib/__init__.py": False,
        "lib/data.py": False,
        "lib/more.py": False,
        "agent.py": True,
        "rewards.py": True,
        "helper.py": False,
    }


def test_the_trainer_is_read_in_every_run(tmp_path):
    shown = {source.path.relative_to(ROOT).as_posix() for source in source_files(None, {})}
    assert {"areal_core/trainer/update.py", "areal_core/algorithm/losses.py"} <= shown
    assert len(shown) > 100
