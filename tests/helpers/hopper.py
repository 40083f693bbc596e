"""Compile a Triton kernel for Hopper, on a machine without a GPU, and read what it takes."""

import re
import subprocess
import tempfile
from pathlib import Path

import attrs
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@attrs.frozen
class Compiled:
    shared: int
    """Bytes of shared memory."""
    stack: int
    """Bytes of local memory per thread: what it spills, and arrays that are not in registers."""
    registers: int
    """Registers per thread."""
    ptx: str


def compile_for_hopper(kernel, types, constants, *, warps=4, stages=3):
    """Compile a kernel whose pointers and integers are multiples of 16.

    Args:
        kernel: a function decorated with ``triton.jit``.
        types: Triton's type of each argument, such as "*bf16" or "i32"; others are ignored.
        constants: values of the arguments that are constants.
    """
    names = kernel.arg_names
    chosen = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = [i for i, name in enumerate(names) if chosen[name] not in ("constexpr", "fp32")]
    source = ASTSource(
        kernel,
        chosen,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = {"num_warps": warps, "num_stages": stages}
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    usage = _resource_usage(found.asm["cubin"])
    stack, registers = (int(re.findall(rf"{name}:(\d+)", usage)[-1]) for name in ("STACK", "REG"))
    return Compiled(found.metadata.shared, stack, registers, found.asm["ptx"])


def _resource_usage(cubin):
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, encoding="utf-8", check=True
        ).stdout
