"""The public name of `areal_core.data`."""

from areal_core.data import *  # noqa: F403
