"""Ranks that a forked program starts are forks too: a test of training pays for no import of torch."""

import pytest

from tests.forks import run_forked

PROGRAM = """
import sys
from pathlib import Path
from areal_core.launch.torchrun import run_ranks

sys.exit(run_ranks(("-m", "areal_debug.train.script", sys.argv[1]), int(sys.argv[2]), {}, Path(sys.argv[3])))
"""


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ranks_have_torch_before_they_import_it(num_ranks, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "rank.py").write_text("import sys\nprint('torch', 'torch' in sys.modules)\n")
    done = run_forked(
        [str(tmp_path / "program.py"), str(tmp_path / "rank.py"), str(num_ranks), str(tmp_path)]
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("torch True") == num_ranks
