"""Write docs/gateway-fields.md: what the gateway does with each field of a request.

python tools/gateway_fields.py docs/gateway-fields.md
"""

import json
import sys
from pathlib import Path

from primerl.rollout.gateways import fields
from primerl.rollout.gateways.fields import Fields, HarmlessField, ServedField

HEAD = """# Fields of requests to the gateway

Made by `python tools/gateway_fields.py docs/gateway-fields.md`. This page is for those whose agent
gets an error about a field, or who want to know what becomes of one. It lists what the
[gateway](agents.md) does with each field of a request. A field that carries history, or that would
change the reply, is served or refused. A field is ignored only if the table says why that is
harmless. A field that no table has is refused; `ignore_fields=["name"]` of `rollout.gateway` or
`rollout.command_agent` declares it harmless. Null is the same as absence.
"""
TABLES: dict[str, Fields] = {
    "Chat Completions": fields.CHAT,
    "Chat Completions: messages": fields.CHAT_MESSAGE,
    "Responses": fields.RESPONSES,
    "Responses: items": fields.RESPONSES_ITEM,
    "Messages": fields.MESSAGES,
    "Messages: messages": fields.MESSAGE,
    "Messages: blocks": fields.BLOCK,
    "Parts of messages": fields.PART,
    "Tools: Chat Completions": {**fields.CHAT_TOOL, **fields.FUNCTION},
    "Tools: Responses": fields.RESPONSES_TOOL,
    "Tools: Messages": fields.MESSAGES_TOOL,
}


def page() -> str:
    """Return the page."""
    parts = [HEAD]
    for title, table in TABLES.items():
        parts.append(f"## {title}\n\n{_table(table)}")
    return "\n".join(parts)


def _table(table: Fields) -> str:
    """Return the rows of a table; fields with the same decision share one."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, field in table.items():
        if isinstance(field, ServedField):
            decision = ("served", field.how)
        elif isinstance(field, HarmlessField):
            decision = ("ignored", field.why)
        else:
            values = ", ".join(f"`{json.dumps(value)}`" for value in field.unless)
            decision = ("refused", field.why + (f" ({values}: accepted)" if values else ""))
        rows.setdefault(decision, []).append(f"`{name}`")
    lines = ["| fields | | why, or how |", "|---|---|---|"]
    lines += [f"| {', '.join(names)} | {what} | {why} |" for (what, why), names in rows.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
