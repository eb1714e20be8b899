"""What exists because torch's class and torch's Reducer have it."""
