"""``python -m primerl.data MODEL FILE [FILE ...]`` checks conversations before a run."""

import sys

from primerl._common.optional import require
from primerl.data.checking import main

if __name__ == "__main__":
    sys.exit(require("tyro", extra="recipes").cli(main, prog="python -m primerl.data"))
