"""Pure functions: rewards, advantages, normalisation, KL and policy losses. Tensors and floats in, tensors and stats out."""
