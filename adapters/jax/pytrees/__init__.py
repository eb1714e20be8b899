"""Pytrees as parameters: which leaves, what they are called, where they lie in a plan."""
