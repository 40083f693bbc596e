"""``VLLMEngine``, an engine that samples from one or more vLLM servers, and its parts."""
