"""`areal-debug serve`: inference servers to debug agents against, and their state."""
