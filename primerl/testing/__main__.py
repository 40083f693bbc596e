"""``python -m primerl.testing FOLDER``: write SmolLM2-135M-Instruct there, without a network."""

import argparse

from primerl.testing.models import smollm2

parser = argparse.ArgumentParser(prog="python -m primerl.testing", description=__doc__)
parser.add_argument("folder", help="is made; where it holds a model already, nothing is done")
print(smollm2(parser.parse_args().folder))  # noqa: T201  the command's answer
