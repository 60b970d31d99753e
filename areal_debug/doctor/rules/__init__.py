"""One module per area of training, one function per alarm; thresholds are rows of a table."""
