"""A gateway: agents that speak the APIs of OpenAI or Anthropic, sampled by an engine."""
