"""From signs of life to a verdict while the job still lives: slow, stuck, partly done, finished without a step."""
