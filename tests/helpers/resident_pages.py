"""The pages of mapped tensors that this process has touched."""

import mmap

import numpy as np

AROUND = 2 * 65536 // mmap.PAGESIZE
"""Pages that the kernel may map at both ends of a tensor, because others near it were touched."""


def resident_pages(tensor):
    """Return how many of the pages that a mapped tensor fills are in this process's page table."""
    first = -(-tensor.data_ptr() // mmap.PAGESIZE)
    last = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        file.seek(8 * first)
        entries = np.frombuffer(file.read(8 * (last - first)), dtype=np.uint64)
    return int((entries >> np.uint64(63)).sum())
