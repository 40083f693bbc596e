"""The plan of a run, and its output as JSON and as text tables."""

import io
import json
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from primerl._common.optional import require
from primerl.planning.incompatibilities import Incompatibility
from primerl.planning.server_memory import ServerPlan
from primerl.planning.sizes import ModelSize
from primerl.planning.step_time import StepTime
from primerl.planning.storage import MARGIN, StoragePlan, asked
from primerl.planning.traffic import Traffic
from primerl.planning.trainer_memory import TrainerPlan


@attrs.frozen(kw_only=True)
class Plan:
    """The plan of a run: memory per GPU, traffic per step, storage, and refused combinations."""

    model: ModelSize
    trainers: tuple[TrainerPlan, ...] = attrs.field(default=(), converter=tuple)
    servers: dict[str, ServerPlan] = attrs.field(factory=dict)
    """Plans of servers, by name."""
    traffic: Traffic | None = None
    storage: StoragePlan | None = None
    """Storage of a run with the first layout."""
    times: dict[str, StepTime] = attrs.field(factory=dict)
    """The time of a step with each layout that was measured."""
    refused_pairs: tuple[Incompatibility, ...] = attrs.field(default=(), converter=tuple)

    @property
    def impossible(self) -> list[str]:
        """The constraints that layouts and servers violate; empty if all fit."""
        trainers = [f"{one.layout}: {one.refusal}" for one in self.trainers if one.refusal]
        servers = [f"{name}: {one.refusal}" for name, one in self.servers.items() if one.refusal]
        return trainers + servers

    @property
    def refusal(self) -> str | None:
        """Why the run's layout or server (the first of each) can't run; None if both can."""
        trainer = next((one.refusal for one in self.trainers), None)
        return trainer or next((one.refusal for one in self.servers.values()), None)

    def json(self) -> str:
        """Return the whole plan as JSON, for other programs."""
        return json.dumps({**attrs.asdict(self), "impossible": self.impossible}, indent=2)

    def text(self, *, width: int = 120) -> str:
        """Return the plan as tables of text, by ``rich``; sizes are in GB, 10^9 bytes."""
        console = require("rich.console", extra="recipes")
        out = io.StringIO()
        page = console.Console(file=out, width=width, highlight=False)
        page.print(f"{_count(self.model.total)} parameters, {_count(self.model.active)} active")
        for title, columns, rows in self._tables():
            if rows:
                page.print(_table(title, columns, rows))
        for one in self.impossible:
            page.print(f"does not fit: {one}", markup=False)
        return out.getvalue()

    def _tables(self) -> Iterable[tuple[str, list[str], list[list[str]]]]:
        ranks = [(plan, one) for plan in self.trainers for one in plan.ranks]
        rows = []
        if ranks:
            names = list(ranks[0][1].by_name)
            rows = [[name, *(_gb(one.by_name[name]) for _, one in ranks)] for name in names]
            rows.append(["total per GPU", *(_gb(one.device) for _, one in ranks)])
            rows.append(
                [
                    "optimizer per node, in host memory",
                    *(_gb(plan.host_per_node) for plan, _ in ranks),
                ]
            )
        columns = ["", *(f"{plan.layout}: rank {one.rank}" for plan, one in ranks)]
        yield "Trainer, GB per GPU", columns, rows
        yield (
            "Parameters on the first rank",
            ["parameter", "layers", "shape", "on this rank", "dtype"],
            [
                [part.name, str(part.count), str(part.shape), str(part.local_shape), part.dtype]
                for plan in self.trainers[:1]
                for one in plan.ranks[:1]
                for part in one.parts
            ],
        )
        yield (
            "Servers, GB per GPU",
            [
                "server",
                "GPUs",
                "ep",
                "weights",
                "KV room",
                "tokens that fit",
                "KV asked",
                "KB/token",
            ],
            [
                [
                    name,
                    str(one.gpus),
                    str(one.ep),
                    _gb(one.weights),
                    _gb(one.kv_room),
                    f"{one.kv_tokens:,}",
                    _gb(one.kv_asked),
                    f"{one.kv_token / 1e3:.1f}",
                ]
                for name, one in self.servers.items()
            ],
        )
        sent = self.traffic
        yield (
            "Traffic per step, GB",
            ["routes", "bytes per token", "full weights", "delta-encoded weights"],
            []
            if sent is None
            else [
                [
                    _gb(sent.routes),
                    str(sent.route_token),
                    _gb(sent.weights),
                    _gb(sent.weights_delta),
                ]
            ],
        )
        places = {} if self.storage is None else self.storage.places
        rows = []
        for place, contents in places.items():
            rows += [[place, content, _gb(size)] for content, size in contents.items()]
            rows.append([place, "sum", _gb(sum(contents.values()))])
            rows.append([place, f"to ask for: {MARGIN:.0%} more", _gb(asked(contents))])
        yield "Storage, GB", ["where", "what", ""], rows
        yield (
            "Time, seconds",
            ["layout", "phase", "", "beside", "computed from"],
            _step_rows(self.times),
        )
        yield (
            "Publication, seconds",
            ["layout", "phase", "a full version", "a delta", ""],
            _publication_rows(self.times),
        )
        yield (
            "Refused combinations",
            ["", "", "reason"],
            [[*one.pair, one.reason] for one in self.refused_pairs],
        )


def _step_rows(times: Mapping[str, StepTime]) -> list[list[str]]:
    """Return the rows of a table of phases, for each layout."""
    rows = []
    for name, time in times.items():
        rows += [
            [name, one.name, f"{one.seconds:.1f}", one.beside or "", one.source]
            for one in (*time.phases, *time.others)
        ]
        rows.append(
            [name, "training", f"{time.training:.1f}", "", "phases that wait for each other"]
        )
        rows += [[name, phase, "-", "", reason] for phase, reason in time.unknown.items()]
        without = f", without {' and '.join(time.unknown)}" if time.unknown else ""
        longest = f"the longest: {time.longest}{without}"
        rows.append([name, "step", f"{time.step:.1f}", "", longest])
        longer = time.full_version_step - time.step
        note = f"{longer:.1f} s longer than others" if longer else "as long as others"
        rows.append([name, "step of a full version", f"{time.full_version_step:.1f}", "", note])
    return rows


def _publication_rows(times: Mapping[str, StepTime]) -> list[list[str]]:
    """Return the rows of a table of a publication's phases, for each layout."""
    rows = []
    for name, time in times.items():
        full, delta = (time.publications[kind] for kind in ("full", "delta"))
        rows += [
            [
                name,
                phase,
                f"{seconds:.1f}",
                f"{delta.phases[phase]:.1f}",
                "training waits" if phase in full.start else "",
            ]
            for phase, seconds in full.phases.items()
        ]
        sums = [sum(one.phases.values()) for one in (full, delta)]
        rows.append([name, "sum", *(f"{seconds:.1f}" for seconds in sums), ""])
    return rows


def _count(number: int) -> str:
    return f"{number / 1e9:.1f}B" if number >= 1e8 else f"{number:,}"


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f}"


def differences(here: Any, there: Any, *, names: tuple[str, str]) -> str:
    """Return a text table of the fields in which two ``attrs`` values of one class differ.

    Args:
        here: a value, such as the settings of a rehearsal.
        there: another value of the same class, such as the settings of the run on a cluster.
        names: names of the two values, for the columns.
    """
    fields = attrs.fields_dict(type(here))
    pairs = {name: (getattr(here, name), getattr(there, name)) for name in fields}
    rows = [[name, _shown(a), _shown(b)] for name, (a, b) in pairs.items() if a != b]
    out = io.StringIO()
    console = require("rich.console", extra="recipes")
    page = console.Console(file=out, highlight=False)  # as wide as the terminal
    page.print(_table("swapped", ["", *names], rows))
    return out.getvalue()


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        value = ", ".join(getattr(one, "__name__", str(one)) for one in value) or "none"
    return str(value)


def _table(title: str, columns: list[str], rows: list[list[str]]) -> Any:
    escape = require("rich.markup", extra="recipes").escape
    table = require("rich.table", extra="recipes").Table(
        title=title, title_justify="left", box=require("rich.box", extra="recipes").SIMPLE_HEAD
    )
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    return table
