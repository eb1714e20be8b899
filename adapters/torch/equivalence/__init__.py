"""The torch side of comparisons between frameworks."""
