"""Add the examples to the wheel, as `areal_debug/examples`; pyproject.toml has everything else."""

from setuptools import find_packages, setup

OURS = ["areal_core*", "recorder*", "replayer*", "consistency*", "hangdoctor*", "areal_debug*"]

setup(
    packages=[*find_packages(include=OURS), "areal_debug.examples"],
    package_dir={"areal_debug.examples": "examples"},
)
