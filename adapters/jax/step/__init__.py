"""`train_step`: a whole jitted training step over all devices and processes."""
