"""The bug in a file: a record cut to one step, with the weights that it needs."""
