"""Modules that several packages share: files, digests, ranks, progress, optional imports.

They import no package of primerl, so that each package can be used on its own.
"""
