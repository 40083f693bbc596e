"""Child processes: how they are started, called, watched and ended."""
