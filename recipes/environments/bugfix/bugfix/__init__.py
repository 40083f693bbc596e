"""A verifiers environment: fix a seeded bug in a small repository. See the README."""

from bugfix.agent import BugfixEnv, BugfixHarness
from bugfix.tasks import Bugfix

__all__ = ["Bugfix", "BugfixEnv", "BugfixHarness"]
