"""Call what another process pickled, such as a server: `-m tests.rollout.served HEX`."""

import pickle
import sys

if __name__ == "__main__":
    pickle.loads(bytes.fromhex(sys.argv[1]))()
