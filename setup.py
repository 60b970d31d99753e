"""Add the examples to the wheel, as `areal_debug/examples`; pyproject.toml has everything else.

An editable installation finds them in the checkout, and stays one folder on the path.
"""

import sys

from setuptools import find_packages, setup

OURS = ["areal_core*", "recorder*", "replayer*", "consistency*", "hangdoctor*", "areal_debug*"]
EXAMPLES = {} if "editable_wheel" in sys.argv else {"areal_debug.examples": "examples"}

setup(packages=[*find_packages(include=OURS), *EXAMPLES], package_dir=EXAMPLES)
