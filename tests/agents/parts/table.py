"""The table of clients that the documentation shows, from the runs of the tests."""

from clients import CLIENTS

HEAD = (
    "client",
    "version",
    "API",
    "streamed",
    "runs with",
    "branches with reasoning",
    "branches without reasoning",
)


ROW = "agents-row"


def row_of(client, policy, branches):
    """Return what the table needs of a run; ``branches`` is None if it did not come to its end."""
    return [client.id, policy.id, policy.reasons, branches]


def table_of(rows):
    """Return the table of ``row_of``'s rows, in the order of the clients."""
    lines = [_row(HEAD), _row(["---"] * len(HEAD))]
    for client in CLIENTS:
        runs = [run for name, *run in rows if name == client.id]
        if not runs:
            continue
        cells = [client.name, client.version, client.api, "yes" if client.streamed else "no"]
        cells.append(client.setting or "its defaults")
        cells += [_branches(runs, reasons=True), _branches(runs, reasons=False)]
        lines.append(_row(cells))
    return "\n".join(lines) + "\n"


def _branches(runs, *, reasons):
    """Return the number of branches, for each policy if the numbers differ."""
    shown = {
        policy: "fails" if number is None else str(number)
        for policy, is_reasoning, number in runs
        if is_reasoning is reasons
    }
    if len(set(shown.values())) <= 1:
        return next(iter(shown.values()), "")
    return ", ".join(f"{name} {number}" for name, number in shown.items())


def _row(cells):
    return f"| {' | '.join(cells)} |"
