"""Environments: they play a task with an engine, and score the result."""
