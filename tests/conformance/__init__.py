"""PyTorch's own DDP tests, which its wheel carries, run on the CPU over gloo with our class in the place of torch's.

`make conformance` runs those that torch's own class passes here (`accepted.json`). An id is `mode:group:Class.test`:
the native mode takes a case as it is, the adapted one runs a case that asks for GPUs on the CPU (see `cpu_shim`).
Nothing here is collected by pytest.
"""
