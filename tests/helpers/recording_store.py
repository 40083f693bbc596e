"""A store of expert routes that records its calls."""

import attrs
import numpy as np


@attrs.define
class RecordingStore:
    """A fake store with references ``fake:0``, ``fake:1``, ...; ``check`` requires a reference."""

    puts: list = attrs.Factory(list)
    """The rows and the other arguments of each call."""
    checked: list = attrs.Factory(list)
    fault: str = ""
    """Message of the error that ``put`` always raises, if it is set."""

    def put(self, rows, *, start, versions, shared=0):
        if self.fault:
            raise ValueError(self.fault)
        assert rows.shape[0] == len(versions) > 0
        assert versions.dtype == np.int32
        self.puts.append((rows, {"start": start, "versions": versions.tolist(), "shared": shared}))
        return (f"fake:{len(self.puts) - 1}",)

    def check(self, sample):
        self.checked.append(sample)
        if not sample.routes:
            raise ValueError("the sample has no routes at token 1, layer 0")
