"""`areal-debug agent`: run an agent alone, under load or again from a record."""
