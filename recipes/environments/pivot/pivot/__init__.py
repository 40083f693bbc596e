"""A verifiers environment: predict the next tool call of a recorded trajectory. See the README."""

from pivot.harness import OneReply
from pivot.tasks import Pivot

__all__ = ["OneReply", "Pivot"]
