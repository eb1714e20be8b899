"""Comparison of numbers between ranks and between frameworks."""
