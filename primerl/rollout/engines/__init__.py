"""Engines, which sample tokens in this process or on vLLM servers."""
