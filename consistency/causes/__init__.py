"""Causes of disagreement, one file a family and one function a cause; ids are those of the catalogue R01 to R60."""
