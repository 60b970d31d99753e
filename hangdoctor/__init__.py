"""Diagnosis of hangs from the stacks of all ranks: a package of areal-debug."""
