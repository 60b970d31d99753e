"""One file per label: `judge(case, graph)` looks for its pattern; the module docstring explains the
pattern.
"""
