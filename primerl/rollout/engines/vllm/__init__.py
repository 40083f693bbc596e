"""vLLM: its server process, and the client that samples from a fleet of them."""
