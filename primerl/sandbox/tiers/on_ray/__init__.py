"""Sandboxes on other hosts, which Ray actors hold."""
