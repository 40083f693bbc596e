"""A live view of a run in the terminal."""

import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from primerl._common.optional import require
from primerl._common.progress import NAME as PROGRESS

PLAIN_WIDTH = 100  # cells of a prompt's end, and of a reply, without a terminal
QUIET_S = 10.0  # without a terminal, the longest time without a progress line
RECENT = 10  # number of last steps from which the time left is estimated
BARS = "▁▂▃▄▅▆▇█"
SHOWN = (
    ("reward", "{:.3f}"),
    ("reward_std", "{:.3f}"),
    ("evaluation", "{:.3f}"),
    ("completion_tokens_mean", "{:.1f}"),
    ("truncated", "{:.1%}"),
    ("loss", "{:.6f}"),
    ("evaluation_loss", "{:.4f}"),
    ("grad_norm", "{:.3f}"),
    ("lr", "{:.1e}"),
    ("entropy", "{:.3f}"),
    ("staleness_max", "{:.0f}"),
    ("staleness_mean", "{:.2f}"),
    ("mismatch_kl", "{:.1e}"),
    ("train_tokens_per_s", "{:,.0f}"),
    ("rollout_tokens_per_s", "{:,.0f}"),
    ("engine_decode_tokens_per_s", "{:,.0f}"),
    ("engine_cache_hits", "{:.1%}"),
    ("engine_waiting", "{:.1f}"),
    ("engine_kv_use", "{:.1%}"),
    ("trainer_wait_s", "{:.2f}"),
    ("rollout_wait_s", "{:.2f}"),
)


class LiveView:
    """A sink that redraws a table with a curve for each metric; plain lines without a terminal.

    Below the table, it shows one reply of the step: the end of the prompt and the beginning of the
    completion. From its creation on, the view also shows the current activity, such as loading,
    ``evaluating 12/32`` or saving: messages of loggers below ``primerl.progress`` at level INFO.

    Args:
        title: the title of the run.
        steps: the number of planned steps.
        console: a ``rich.console.Console``; by default, standard output.
    """

    def __init__(self, title: str, *, steps: int, console: Any = None) -> None:
        require("rich", extra="recipes")
        from rich.console import Console
        from rich.live import Live

        self._title = title
        self._steps = steps
        self._history: dict[str, list[float]] = {}
        self._began = self._last_line = time.monotonic()
        self._table: Any = None
        self._phase = ""
        self._reply: tuple[str, str, float] | None = None
        self._progress = ProgressHandler(self)
        self._console = console or Console(file=sys.stdout)
        self._live: Any = None
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=False)
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            self._console.print(f"Ctrl-C is ignored in the background; to stop: kill {os.getpid()}")

    def __call__(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show one step's metrics, and its ``alarm`` text, if there is one; or an evaluation's."""
        if metrics.get("alarm"):
            self._console.print(metrics["alarm"], highlight=False, soft_wrap=True)
        for name, value in metrics.items():
            if isinstance(value, int | float):
                self._history.setdefault(name, []).append(float(value))
        self._last_line = time.monotonic()
        if "evaluation" in metrics:
            if self._live is None:
                text = f"evaluation of version {step}  {metrics['evaluation']:.3f}"
                self._console.print(text, highlight=False)
            return  # the next step's table shows it
        if self._live is None:
            line = f"step {step + 1}/{self._steps}  {_line(metrics)}  {self._time(step)}"
            self._console.print(line, highlight=False, soft_wrap=True)
            for text in self._reply_lines(PLAIN_WIDTH):
                self._console.print(text, soft_wrap=True)
        else:
            from rich.console import Group

            lines = self._reply_lines(self._console.width)
            self._table = Group(self.table(step, metrics), *lines)
            self._live.start()
            self._live.update(self._table, refresh=True)

    def show_reply(self, prompt: str, completion: str, reward: float) -> None:
        """Set the reply that is shown with the step's metrics, which come next."""
        self._reply = (prompt, completion, reward)

    def _reply_lines(self, width: int) -> list[Any]:
        """Return the prompt's end and the reply's beginning, one line of ``width`` cells each."""
        from rich.text import Text

        if self._reply is None:
            return []
        prompt, completion, reward = self._reply
        lines = []
        for label, text in (
            ("prompt  ", end_of(visible(prompt), width - len("prompt  "))),
            (f"reply, reward {reward:.3g}  ", visible(completion)),
        ):
            # rich would parse a string as markup, but not a Text.
            line = Text(label, style="dim", no_wrap=True).append(text, style="not dim")
            line.truncate(width, overflow="ellipsis")
            lines.append(line)
        return lines

    def close(self) -> None:
        """Stop updating; the last table stays on the screen."""
        self._progress.close()
        if self._live is not None:
            if self._table is not None:
                self._live.update(self._table, refresh=True)
            self._live.stop()

    def show_progress(self, phase: str, text: str) -> None:
        """Show the current activity, until the next step."""
        now = time.monotonic()
        if self._live is not None:
            from rich.console import Group
            from rich.text import Text

            status = Text(f"{duration(now - self._began)}  {text}", style="dim")
            self._live.start()
            self._live.update(Group(self._table, status) if self._table else status, refresh=True)
        elif now - self._last_line > QUIET_S or (not self._history and phase != self._phase):
            self._console.print(f"{duration(now - self._began)}  {text}", highlight=False)
            self._last_line = now
        self._phase = phase

    def table(self, step: int, metrics: Mapping[str, Any]) -> Any:
        """Return the table of one step, as a rich renderable."""
        from rich import box
        from rich.table import Table

        title = f"{self._title}  step {step + 1}/{self._steps}  {self._time(step)}"
        table = Table(title=title, title_style="bold", title_justify="left", box=box.SIMPLE)
        table.add_column("metric")
        table.add_column("now", justify="right", style="bold")
        table.add_column("so far", no_wrap=True, style="cyan")
        for name, form in SHOWN:
            history = self._history.get(name, [])
            value = metrics.get(name)
            if name.startswith("engine_") and not history:  # no servers were read
                continue
            if name == "evaluation" and history:
                value = history[-1]
            now = form.format(value) if isinstance(value, int | float) else "-"
            table.add_row(name, now, sparkline(history))
        return table

    def _time(self, step: int) -> str:
        """Return the elapsed time, and an estimate of the time left from the last steps."""
        last = self._history.get("step_s", [])[-RECENT:]
        left = f", {duration(fmean(last) * (self._steps - step - 1))} left" if last else ""
        return f"{duration(time.monotonic() - self._began)} elapsed{left}"


class ProgressHandler(logging.Handler):
    """Passes progress messages to a view, until it is closed or another handler is created.

    A new handler closes earlier ones, since their views may belong to runs that failed before they
    began.
    """

    def __init__(self, view: LiveView) -> None:
        super().__init__(logging.INFO)
        self.view = view
        logger = logging.getLogger(PROGRESS)
        logger.setLevel(logging.INFO)
        for earlier in logger.handlers[:]:
            if isinstance(earlier, ProgressHandler):
                earlier.close()
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Show a log record in the view."""
        self.view.show_progress(getattr(record, "phase", ""), record.getMessage())

    def close(self) -> None:
        """Stop showing log records."""
        logging.getLogger(PROGRESS).removeHandler(self)
        super().close()


def close_views() -> None:
    """Close the view that shows progress; its run may have failed before it began."""
    for handler in logging.getLogger(PROGRESS).handlers[:]:
        if isinstance(handler, ProgressHandler):
            handler.view.close()


def sparkline(values: list[float], *, width: int = 40) -> str:
    """Draw the values as a line of bars from their minimum to maximum, thinned to ``width``."""
    if not values:
        return ""
    if len(values) > width:
        values = [values[int(i * len(values) / width)] for i in range(width)]
    low, high = min(values), max(values)
    # Halves, since the difference of two large numbers may overflow.
    scale = (len(BARS) - 1) / (high / 2 - low / 2) if high / 2 > low / 2 else 0.0
    return "".join(BARS[round((value / 2 - low / 2) * scale)] for value in values)


def visible(text: str) -> str:
    """Return the text on one line, with control characters, which terminals obey, escaped."""
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


def end_of(text: str, width: int) -> str:
    """Return the end of the text that fits into ``width`` cells of a terminal."""
    from rich.cells import cell_len

    if cell_len(text) <= width:
        return text
    end = text[-width:]  # a character takes 0, 1 or 2 cells
    while cell_len(end) > width - 1:
        end = end[1:]
    return "…" + end


def duration(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds, like 1:02:03 or 2:03."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _line(metrics: Mapping[str, Any]) -> str:
    parts = [
        f"{name} {form.format(metrics[name])}"
        for name, form in SHOWN
        if isinstance(metrics.get(name), int | float)
    ]
    return "  ".join(parts)
