"""The JAX side of comparisons between frameworks."""
