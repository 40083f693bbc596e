"""Execution of jobs, in processes that are confined and have no more rights than the code."""
