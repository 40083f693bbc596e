"""``VLLMEngine``: a client of one or more vLLM servers."""
