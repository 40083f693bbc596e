"""Child processes that end with their owner, and everything that they start."""
