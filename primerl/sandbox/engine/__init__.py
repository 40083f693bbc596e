"""What runs between the host and sandboxed code: of the standard library alone.

    owner -> keeper -> zygote -> init (first process of a sandbox) -> child (runs the code)

The keeper removes what a crashed owner leaves behind; the zygote makes sandboxes; an init starts
and ends what runs in its sandbox. Only the child, behind all ``barriers``, ever sees untrusted
code, and does the ``work`` of an order. In containers and hosted machines, ``guest`` takes the
place of keeper, zygote and init.
"""
