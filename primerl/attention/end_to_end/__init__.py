"""Attention of all spans of a pack by kernels for GPUs, behind one operator of torch.

The choice of a kernel depends on the lengths in a pack, so the operator chooses when it runs, and a
compiled model has one graph for all lengths. They are read from the layout's plan, which is in host
memory, so nothing waits for the device but the first trial of a kernel. On a CPU, the operator
computes the same by ``span_kernels``, for tests.

``operators`` has the operator and its gradient. They make the layout of a plan by ``layouts``,
choose a kernel by ``choice``, which tries it by ``trials``, and call it by ``calls``. ``flash4``,
``cudnn``, ``varlen`` and ``spans`` each call one library; ``interface`` says what they get and
return.
"""
