"""`areal-debug goto`: a shell or debugger at any step of a recorded run."""
