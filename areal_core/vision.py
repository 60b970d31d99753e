"""The former package of pictures, whose names users' scripts import."""

import sys

from areal_core.data import processor
from areal_core.engine import vision_models as inputs

sys.modules |= {f"{__name__}.processor": processor, f"{__name__}.inputs": inputs}
