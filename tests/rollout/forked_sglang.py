"""Run SGLang's server with its workers as forks, which do not import SGLang a second and third time.

As `python -m sglang.launch_server` with the same arguments. `sglang` sets the start method "spawn".
"""

import multiprocessing
import runpy

if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda method, force=False: None
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
