"""The guest code: the processes between the host and sandboxed code, with the stdlib only.

    owner -> keeper -> zygote -> init (first process of a sandbox) -> child (runs the code)

The keeper cleans up after an owner that crashed. The zygote forks sandboxes. The init process of a
sandbox starts and ends the sandbox's other processes. Only the child handles untrusted code: it is
fully isolated (``isolation``) and then executes a job (``jobs``). In containers, gVisor and hosted
machines, ``single_job`` replaces keeper, zygote and init.
"""
