"""Supervised child processes, which end with their owner, with all processes they started."""
