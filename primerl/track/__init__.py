"""Tracking: a run's folder, metrics, trained rollouts and live view."""

from primerl.track.live import LiveView
from primerl.track.runs import Run
from primerl.track.sinks import Sink, wandb_sink

__all__ = ["LiveView", "Run", "Sink", "wandb_sink"]
