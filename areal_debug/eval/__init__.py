"""`areal-debug eval`: evaluate models on the validation rows of a training script."""
