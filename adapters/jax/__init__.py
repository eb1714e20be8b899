"""The JAX adapter."""
