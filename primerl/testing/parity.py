"""``python -m primerl.testing.parity``: another name for ``python -m primerl.parity``."""

import runpy

if __name__ == "__main__":
    runpy.run_module("primerl.parity", run_name="__main__", alter_sys=True)
