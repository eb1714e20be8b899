"""Reducing gradients over mapped axes, bucket by bucket."""
