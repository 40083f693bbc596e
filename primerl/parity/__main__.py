"""``python -m primerl.parity FAMILY``: compare training on a mesh with plain Hugging Face code."""

import sys

from primerl._common.optional import require
from primerl.parity.command import main

if __name__ == "__main__":
    sys.exit(require("tyro", extra="recipes").cli(main))
