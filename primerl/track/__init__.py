"""Tracking of a run: its folder, metrics, trained rollouts, live view and report."""

from primerl.track.arguments import (
    command_line,
    instead_of,
    new_file,
    number,
    require_model,
    require_shared_folder,
    urls,
)
from primerl.track.evaluation_log import EvaluationLog, read_evaluation
from primerl.track.interrupts import interruptible
from primerl.track.live import LiveView
from primerl.track.mismatch_gate import MismatchGate
from primerl.track.report import write_report
from primerl.track.rollout_files import read_rollouts
from primerl.track.runs import IdleRun, Run
from primerl.track.sinks import Sink, tensorboard_sink, trackio_sink, wandb_sink

__all__ = [
    "IdleRun",
    "LiveView",
    "MismatchGate",
    "EvaluationLog",
    "Run",
    "Sink",
    "command_line",
    "instead_of",
    "interruptible",
    "new_file",
    "number",
    "read_evaluation",
    "read_rollouts",
    "require_model",
    "require_shared_folder",
    "tensorboard_sink",
    "trackio_sink",
    "urls",
    "wandb_sink",
    "write_report",
]
