"""Causes of a mismatch: one file per family, one function per cause.

Each function returns a finding, or None; its docstring begins with the id, R01 to R67, that reports
show.
"""
