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

PLAIN_WIDTH = 100  # of a prompt's end, and of a reply, off a terminal
QUIET_S = 10.0  # off a terminal, a line is printed at least this often while something is done
RECENT = 10  # steps that the time left is estimated from
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
    ("trainer_wait_s", "{:.2f}"),
    ("rollout_wait_s", "{:.2f}"),
)


class LiveView:
    """A sink that redraws a table with a curve for each metric; plain lines off a terminal.

    Below the table is one reply of the step, of the end of a prompt and the beginning of what was
    sampled. From when it is made, the view also shows what is being done: loading, evaluating
    12/32, saving. That is what loggers below ``primerl.progress`` say, at the level INFO.

    Args:
        title: of the run.
        steps: how many are planned.
        console: a ``rich.console.Console``; the standard output by default.
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
        """Show one step's metrics, and its ``alarm``, a text, if there is one."""
        if metrics.get("alarm"):
            self._console.print(metrics["alarm"], highlight=False, soft_wrap=True)
        for name, value in metrics.items():
            if isinstance(value, int | float):
                self._history.setdefault(name, []).append(float(value))
        self._last_line = time.monotonic()
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
        """Show one of a step's replies with the step's metrics, which come next."""
        self._reply = (prompt, completion, reward)

    def _reply_lines(self, width: int) -> list[Any]:
        """The end of the prompt and the beginning of the reply, a line of ``width`` cells each."""
        from rich.text import Text

        if self._reply is None:
            return []
        prompt, completion, reward = self._reply
        lines = []
        for label, text in (
            ("prompt  ", end_of(visible(prompt), width - len("prompt  "))),
            (f"reply, reward {reward:.3g}  ", visible(completion)),
        ):
            # A Text, unlike a string, is not read as markup.
            line = Text(label, style="dim", no_wrap=True).append(text, style="not dim")
            line.truncate(width, overflow="ellipsis")
            lines.append(line)
        return lines

    def close(self) -> None:
        """Leave the last table on the screen."""
        self._progress.close()
        if self._live is not None:
            if self._table is not None:
                self._live.update(self._table, refresh=True)
            self._live.stop()

    def show_progress(self, phase: str, text: str) -> None:
        """Show what is done now, until the next step."""
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
        """The table of one step, as a rich renderable."""
        from rich import box
        from rich.table import Table

        title = f"{self._title}  step {step + 1}/{self._steps}  {self._time(step)}"
        table = Table(title=title, title_style="bold", title_justify="left", box=box.SIMPLE)
        table.add_column("metric")
        table.add_column("now", justify="right", style="bold")
        table.add_column("so far", no_wrap=True, style="cyan")
        for name, form in SHOWN:
            value = metrics.get(name)
            now = "-" if value is None else form.format(value)
            table.add_row(name, now, sparkline(self._history.get(name, [])))
        return table

    def _time(self, step: int) -> str:
        """The time since the start, and what is left if further steps take as long as the last."""
        last = self._history.get("step_s", [])[-RECENT:]
        left = f", {duration(fmean(last) * (self._steps - step - 1))} left" if last else ""
        return f"{duration(time.monotonic() - self._began)} elapsed{left}"


class ProgressHandler(logging.Handler):
    """Passes reports of progress to a view.

    Until it is closed, or another is made: an earlier view may belong to a run that failed before
    it began.
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
        """Show a record."""
        self.view.show_progress(getattr(record, "phase", ""), record.getMessage())

    def close(self) -> None:
        """Show no more."""
        logging.getLogger(PROGRESS).removeHandler(self)
        super().close()


def close_views() -> None:
    """Close the view that shows progress, of a run that may have failed before it began."""
    for handler in logging.getLogger(PROGRESS).handlers[:]:
        if isinstance(handler, ProgressHandler):
            handler.view.close()


def sparkline(values: list[float], *, width: int = 40) -> str:
    """The values as a line of bars from their least to their greatest, thinned to ``width``."""
    if not values:
        return ""
    if len(values) > width:
        values = [values[int(i * len(values) / width)] for i in range(width)]
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)


def visible(text: str) -> str:
    """The text on one line, with control characters as escapes: they could steer the terminal."""
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


def end_of(text: str, width: int) -> str:
    """The end of the text that fits into ``width`` cells of a terminal."""
    from rich.cells import cell_len

    if cell_len(text) <= width:
        return text
    end = text[-width:]  # a letter takes a cell or two, or none
    while cell_len(end) > width - 1:
        end = end[1:]
    return "…" + end


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, as 1:02:03 or 2:03."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _line(metrics: Mapping[str, Any]) -> str:
    parts = [
        f"{name} {form.format(metrics[name])}"
        for name, form in SHOWN
        if metrics.get(name) is not None
    ]
    return "  ".join(parts)
