"""Environments: a task is played with an engine, and scored."""
