"""``serve_vllm``: a vLLM server in a child process."""
