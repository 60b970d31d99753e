"""Add the examples to the wheel, and links that work on the page of a package index.

pyproject.toml has everything else. The examples become `areal_debug/examples`; an editable
installation finds them in the checkout, and stays one folder on the path. An index shows README.md
without the files beside it: its links lead to the repository, whose address the release workflow
sets in `AREAL_DEBUG_REPOSITORY`; a build that does not know it leaves their words.
"""

import os
import re
import sys
import tomllib
from pathlib import Path

from setuptools import find_packages, setup

OURS = ["areal_core*", "recorder*", "replayer*", "consistency*", "hangdoctor*", "areal_debug*"]
EXAMPLES = {} if "editable_wheel" in sys.argv else {"areal_debug.examples": "examples"}
ROOT = Path(__file__).parent
REPOSITORY = os.environ.get("AREAL_DEBUG_REPOSITORY", "")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
LOCAL = r"\((?!\w+:|#)([^)\s]+)\)"
IMAGE = re.compile(rf"!\[([^\]]*)\]{LOCAL}")
LINK = re.compile(rf"\[(!\[[^\]]*\]\([^)]*\)|[^\[\]]*)\]{LOCAL}")
PAGES = {
    "Source": "",
    "Documentation": f"/blob/v{VERSION}/docs/index.md",
    "Changelog": f"/blob/v{VERSION}/CHANGELOG.md",
    "Issues": "/issues",
}


def readme() -> str:
    """Return the README with absolute links, or without the local ones."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if not REPOSITORY:
        return LINK.sub(r"\1", IMAGE.sub("", text))
    text = IMAGE.sub(rf"![\1]({REPOSITORY}/raw/v{VERSION}/\2)", text)
    return LINK.sub(rf"[\1]({REPOSITORY}/blob/v{VERSION}/\2)", text)


setup(
    packages=[*find_packages(include=OURS), *EXAMPLES],
    package_dir=EXAMPLES,
    long_description=readme(),
    long_description_content_type="text/markdown",
    project_urls={title: REPOSITORY + page for title, page in PAGES.items()} if REPOSITORY else {},
)
