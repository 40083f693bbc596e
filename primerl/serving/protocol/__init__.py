"""Request bodies, response schemas and weight labels of vLLM servers."""
