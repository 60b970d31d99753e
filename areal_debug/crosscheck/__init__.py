"""`areal-debug crosscheck`: a step recomputed by other code than the trainer's."""
