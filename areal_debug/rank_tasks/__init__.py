"""What the ranks of a verb run: entry points of processes that other processes start."""
