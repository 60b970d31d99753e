"""`areal-debug agent`: run an agent alone or under load."""
