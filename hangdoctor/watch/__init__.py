"""From signs of life to a verdict while the job runs: slow, stuck, partly done, finished without a
step.
"""
