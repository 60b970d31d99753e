"""`areal-debug agent`: run an agent alone, under load or inside the trainer."""
