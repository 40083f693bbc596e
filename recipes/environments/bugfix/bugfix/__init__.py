"""A verifiers environment whose tasks are seeded bugs in small repositories. See the README."""

from bugfix.agent import BugfixEnv, BugfixHarness
from bugfix.tasks import Bugfix

__all__ = ["Bugfix", "BugfixEnv", "BugfixHarness"]
