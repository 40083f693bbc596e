"""Tracking: a run's folder, metrics, trained rollouts, live view and report."""

from primerl.track.arguments import command_line, instead_of, new_file, number
from primerl.track.interrupts import interruptible
from primerl.track.live import LiveView
from primerl.track.mismatch_gate import MismatchGate
from primerl.track.play_log import PlayLog, read_plays
from primerl.track.report import write_report
from primerl.track.runs import IdleRun, Run
from primerl.track.sinks import Sink, tensorboard_sink, trackio_sink, wandb_sink

__all__ = [
    "IdleRun",
    "LiveView",
    "MismatchGate",
    "PlayLog",
    "Run",
    "Sink",
    "command_line",
    "instead_of",
    "interruptible",
    "new_file",
    "number",
    "read_plays",
    "tensorboard_sink",
    "trackio_sink",
    "wandb_sink",
    "write_report",
]
