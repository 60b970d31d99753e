"""Who is slow: rounds of stacks of a running job, a time budget per rank and phase, one verdict.

sample.py: rounds of stacks ─> phases.py: phase of each ─> budget.py ─> blame.py: who is late
                                                   engines.py: which server a rank waits for ┘
"""
