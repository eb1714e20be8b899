"""What reduces a bucket in place of the mean by all-reduce."""
