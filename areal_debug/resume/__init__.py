"""What a run carries over: states over a resume, rows of the data over the run."""
