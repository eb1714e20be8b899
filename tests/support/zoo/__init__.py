"""Right pairs: one model each in torch and in JAX. Options change one side, and make a fault of it."""
