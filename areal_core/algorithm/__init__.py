"""Pure functions of tensors: rewards, advantages, normalisation, KL and losses."""
