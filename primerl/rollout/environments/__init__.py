"""Environments, which play tasks with an engine and score the results."""
