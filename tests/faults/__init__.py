"""Programs in which DDP is known to be silently wrong, late or misleading, as a table: `python -m faults`."""
