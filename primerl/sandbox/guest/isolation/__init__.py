"""Isolation by the Linux kernel: its system calls, and the two kinds of local sandboxes."""
