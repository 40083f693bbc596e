"""In-process agents: the loop that runs them, their limits, tools and context management."""
