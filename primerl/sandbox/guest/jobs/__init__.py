"""Execution of jobs, in confined processes that have no more rights than the sandboxed code."""
