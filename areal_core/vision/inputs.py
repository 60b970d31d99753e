"""The former name of `areal_core.engine.vision`, which users' scripts import."""

from areal_core.engine.vision import image_keys

__all__ = ["image_keys"]
