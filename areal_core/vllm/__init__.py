"""vLLM servers: their start, their routes, and what is added to their workers."""
