"""Which tensors of the first side make which of the second: linear maps, found from module types, names and probing."""
