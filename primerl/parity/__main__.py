"""``python -m primerl.parity FAMILY``: does a family of models train right under a mesh?"""

import sys

from primerl._optional import require
from primerl.parity.command import main

if __name__ == "__main__":
    sys.exit(require("tyro", extra="recipes").cli(main))
