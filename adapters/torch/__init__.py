"""The PyTorch adapter."""
