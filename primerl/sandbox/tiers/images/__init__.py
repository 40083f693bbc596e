"""Container images of sessions: finding, unpacking and keeping them on a host."""
