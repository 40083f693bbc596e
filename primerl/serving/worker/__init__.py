"""Code that runs inside vLLM's workers: receives weights and reports what is served."""
