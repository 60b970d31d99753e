"""`areal-debug query`: SQL over a record."""
