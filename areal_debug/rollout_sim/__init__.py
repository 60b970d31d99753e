"""`areal-debug rollout-sim`: measure the rollout client with hundreds of simulated servers."""
