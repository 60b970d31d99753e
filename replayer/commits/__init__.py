"""Find the code that changed the numbers: a commit, a file, a line, a layer."""
