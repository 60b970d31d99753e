"""`with areal_debug.watch():` around any training loop: hangs, dead ranks, values not finite."""
