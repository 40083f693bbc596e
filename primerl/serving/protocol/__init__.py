"""What is sent to a vLLM server, and what its answers mean."""
