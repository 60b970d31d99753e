"""The former name of `areal_core.data.processor`, which users' scripts import."""

from areal_core.data.processor import *  # noqa: F403
