"""torchrun, except that it ends with the exit code of the rank that failed first.

Run as `python -m areal_core.launch.ranks --nproc-per-node 2 script.py ...`. torchrun itself ends with 1 whatever happened, which
would hide that a rank ended with 2 (misuse) or was killed.
"""

import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main() -> None:
    try:
        run.main(sys.argv[1:])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        print(f"rank {rank} ended first, with exit code {code}", file=sys.stderr)
        sys.exit(code if code > 0 else 128 - code)  # a negative code is a signal's number


if __name__ == "__main__":
    main()
