"""Tracking: a run's folder, metrics, trained rollouts and live view."""

from primerl.track.arguments import instead_of, new_file, number
from primerl.track.live import LiveView
from primerl.track.runs import Run
from primerl.track.sinks import Sink, wandb_sink

__all__ = ["LiveView", "Run", "Sink", "instead_of", "new_file", "number", "wandb_sink"]
