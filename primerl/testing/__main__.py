"""``python -m primerl.testing FOLDER`` writes SmolLM2-135M-Instruct there, without a network."""

import sys

from primerl.testing.models import smollm2

if len(sys.argv) != 2:
    sys.exit("usage: python -m primerl.testing FOLDER    (writes SmolLM2-135M-Instruct there)")
print(smollm2(sys.argv[1]))  # noqa: T201  the command's answer
