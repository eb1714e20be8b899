"""How gradients are reduced: from the hook on a parameter to its reduced `.grad`."""
