"""`areal-debug replay`: start the ranks of a replay, run a task on each, print the result."""
