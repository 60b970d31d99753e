"""One file per label: `judge(case, graph)` says whether its pattern is there; its docstring teaches the pattern."""
