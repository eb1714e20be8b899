"""What ranks compare and tell each other, beside gradients."""
