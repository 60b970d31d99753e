"""`areal-debug diff` and `bisect-step`: find where two records diverge."""
