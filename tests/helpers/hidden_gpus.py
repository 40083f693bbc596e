"""GPUs are hidden from runs of other tests than those of GPUs.

Many tests start ranks, which each take a GPU of their own if they see any, and a machine may have
fewer GPUs than a test has ranks.
"""

import os
from collections import defaultdict


def selects_gpu_tests(expression):
    """Check whether pytest's option ``-m`` selects tests marked ``gpu``, and none without a mark.

    Without an expression, all tests are selected, most of which must not see a GPU.
    """

    def selected(*marks):
        known = defaultdict(bool, dict.fromkeys(marks, True))
        return bool(eval(expression, {}, known)) if expression else True

    return selected("gpu") and not selected()


def hide_gpus():
    """Hide GPUs from this process, which must not have looked for any, and from its children."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
