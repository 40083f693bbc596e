"""A verifiers environment: issues of your own repositories or of SWE-bench. See the README."""

from swe_folder.agent import SweFolderEnv, SweFolderHarness
from swe_folder.tasks import SweFolder

__all__ = ["SweFolder", "SweFolderEnv", "SweFolderHarness"]
