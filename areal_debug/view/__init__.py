"""`areal-debug open`: a record as one HTML page, or served while a run records."""
