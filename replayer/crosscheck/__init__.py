"""A recorded step, recomputed by a float64 twin and by the code of other frameworks."""
