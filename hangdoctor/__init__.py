"""Diagnose a hang from the stacks of all ranks: its class, its culprits and the evidence."""
