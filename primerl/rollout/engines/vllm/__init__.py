"""vLLM servers: the engine that is their client, the server process, and the protocol."""
