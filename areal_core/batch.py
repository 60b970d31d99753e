"""The public name of `areal_core.data.batch`."""

from areal_core.data.batch import *  # noqa: F403
