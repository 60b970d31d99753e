"""`areal-debug train`: run a training script on its ranks, and read its options beforehand."""
