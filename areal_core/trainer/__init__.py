"""Training loops: policy optimisation (`rl.py`) and the supervised methods (`supervised.py`)."""
