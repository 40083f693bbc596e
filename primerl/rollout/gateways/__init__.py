"""The gateway: a server for agents that use the APIs of OpenAI or Anthropic."""
