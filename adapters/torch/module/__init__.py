"""What happens to the wrapped module: changes, buffers, replicas, SyncBatchNorm."""
