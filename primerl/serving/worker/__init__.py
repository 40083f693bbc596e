"""What runs inside vLLM's workers to receive weights."""
