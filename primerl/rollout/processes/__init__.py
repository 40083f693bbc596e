"""Child processes: how they start, talk, are watched and end."""
