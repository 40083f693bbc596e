"""Agents: what they sampled as token-exact sequences, loops that run them, limits and tools."""
