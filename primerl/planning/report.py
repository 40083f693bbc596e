"""All of a plan: as a value, as JSON, and as text."""

import io
import json
from collections.abc import Iterable
from typing import Any

import attrs

from primerl._common.optional import require
from primerl.planning.pairs import Refusal
from primerl.planning.server import ServerPlan
from primerl.planning.sizes import ModelSize
from primerl.planning.traffic import Traffic
from primerl.planning.trainer import TrainerPlan


@attrs.frozen(kw_only=True)
class Plan:
    """What a run would take, where, and what of it is impossible."""

    model: ModelSize
    trainers: tuple[TrainerPlan, ...] = attrs.field(default=(), converter=tuple)
    servers: dict[str, ServerPlan] = attrs.field(factory=dict)
    """By a name for each."""
    traffic: Traffic | None = None
    refused_pairs: tuple[Refusal, ...] = attrs.field(default=(), converter=tuple)

    @property
    def impossible(self) -> list[str]:
        """The constraint that each layout or server breaks; empty: all fit."""
        trainers = [f"{one.layout}: {one.refusal}" for one in self.trainers if one.refusal]
        servers = [f"{name}: {one.refusal}" for name, one in self.servers.items() if one.refusal]
        return trainers + servers

    @property
    def refusal(self) -> str | None:
        """Why the first layout or the first server, which a run takes, can't be; None: both fit."""
        trainer = next((one.refusal for one in self.trainers), None)
        return trainer or next((one.refusal for one in self.servers.values()), None)

    def json(self) -> str:
        """All values, for other programs."""
        return json.dumps({**attrs.asdict(self), "impossible": self.impossible}, indent=2)

    def text(self, *, width: int = 120) -> str:
        """Tables for people, by ``rich``; sizes are in GB, 10^9 bytes."""
        console = require("rich.console", extra="recipes")
        out = io.StringIO()
        page = console.Console(file=out, width=width, highlight=False)
        page.print(f"{_count(self.model.total)} parameters, {_count(self.model.active)} active")
        for title, columns, rows in self._tables():
            if rows:
                page.print(_table(title, columns, rows))
        for one in self.impossible:
            page.print(f"refused: {one}", markup=False)
        return out.getvalue()

    def _tables(self) -> Iterable[tuple[str, list[str], list[list[str]]]]:
        ranks = [(plan, one) for plan in self.trainers for one in plan.ranks]
        rows = []
        if ranks:
            names = list(ranks[0][1].by_name)
            rows = [[name, *(_gb(one.by_name[name]) for _, one in ranks)] for name in names]
            rows.append(["all of these", *(_gb(one.device) for _, one in ranks)])
            rows.append(["host of a node", *(_gb(plan.host_per_node) for plan, _ in ranks)])
        columns = ["", *(f"{plan.layout}: rank {one.rank}" for plan, one in ranks)]
        yield "Trainer, GB of a GPU", columns, rows
        yield (
            "Parts of the first rank",
            ["parameter", "layers", "shape", "on this rank", "dtype"],
            [
                [part.name, str(part.count), str(part.shape), str(part.local_shape), part.dtype]
                for plan in self.trainers[:1]
                for one in plan.ranks[:1]
                for part in one.parts
            ],
        )
        yield (
            "Servers, GB of a GPU",
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
            "Traffic of a step, GB",
            ["routes", "bytes of a token", "weights, in full", "weights, as a difference"],
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
        yield (
            "Refused together",
            ["", "", "reason"],
            [[*one.pair, one.reason] for one in self.refused_pairs],
        )


def _count(number: int) -> str:
    return f"{number / 1e9:.1f}B" if number >= 1e8 else f"{number:,}"


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f}"


def differences(here: Any, there: Any, *, names: tuple[str, str]) -> str:
    """A table of the fields in which two ``attrs`` values of one class differ, as text.

    Args:
        here: a value, such as the settings of a rehearsal.
        there: another value of the same class, such as the settings of the run on a cluster.
        names: of the two, for the columns.
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
