"""Grading: run a repository's hidden tests in a new sandbox, and compare the results on the host.

The new sandbox gets only the program's own modules and those that the agent added, so that other
files of the agent have no effect. It also gets the inputs of the tests, but never the expected
values (see ``primerl.sandbox.grade``).
"""

from collections.abc import Mapping

import attrs

from bugfix.corpus import Program
from primerl.sandbox import Case, SandboxPool, grade
from primerl.sandbox.grading import same

# Source of the graded function, which imports the repository and evaluates the lines of the tests.
_RUN = """
import os, sys
FILES = {files!r}
for path, text in FILES.items():
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, "w") as file:
        file.write(text)
sys.path.insert(0, os.getcwd())

def run(scripts):
    results = []
    for script in scripts:
        names = {{}}
        exec("from {module} import *", names)
        for code, compared in script:
            try:
                try:
                    compiled = compile(code, "check", "eval")
                except SyntaxError:
                    result = ("value", exec(compile(code, "check", "exec"), names))
                else:
                    result = ("value", eval(compiled, names))
            except Exception as error:
                result = ("raised", type(error).__name__)
            if compared:
                results.append(result)
    return results
"""


@attrs.frozen
class Grade:
    """Number of hidden tests that passed; ``reason`` says why others failed, or is empty."""

    passed: int
    total: int
    reason: str

    @property
    def fixed(self) -> bool:
        """Whether all hidden tests passed."""
        return not self.reason


async def grade_files(
    pool: SandboxPool, program: Program, files: Mapping[str, str], *, timeout_s: float = 10.0
) -> Grade:
    """Run the hidden tests of a program on ``files``, the texts of all modules by path.

    Raises:
        SandboxError: no sandbox could be created.
    """
    checks = program.checks
    expected = [check.expected for check in checks]
    [verdict] = await grade(
        pool,
        _RUN.format(files=dict(files), module=program.module),
        [Case(args=(program.runnable,), expected=expected)],
        function="run",
        timeout_s=timeout_s,
    )
    if verdict.passed:
        return Grade(len(checks), len(checks), "")
    values = verdict.value if isinstance(verdict.value, list) else []
    passed = [same(value, want) for value, want in zip(values, expected, strict=False)]
    if not values:
        return Grade(0, len(checks), verdict.reason)
    return Grade(sum(passed), len(checks), "hidden tests failed")
