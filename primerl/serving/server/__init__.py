"""``serve_vllm``, which runs a vLLM server in a child process, and its parts."""
