"""A verifiers environment of math problems to solve with Python in a sandbox. See the README."""

from python_math.agent import PythonMathEnv, PythonMathHarness
from python_math.tasks import PythonMath

__all__ = ["PythonMath", "PythonMathEnv", "PythonMathHarness"]
