"""Today's clients, unchanged, against the gateway: run with ``make test-agents``.

Each client plays a task of two tools to its end, with the output formats of several families.
"""

import asyncio

import attrs
import pytest

pytest.importorskip("renderers", reason="renderers is not installed")

import branches
from chat_tokenizer import RecordingEngine
from clients import CLIENTS, Address
from exactness import inexact
from families import FAMILIES
from installation import install
from recording_proxy import RecordingProxy
from scripted_policy import CODE, DONE, LOOKED, NOTE, TASK, WRITTEN, WROTE, Policy
from table import ROW, row_of

from primerl import rollout
from primerl.rollout import AgentLimits
from primerl.types import SamplingParams

pytestmark = pytest.mark.agents
TIMEOUT_S = 120.0
POLICIES = [
    *(Policy(family=family, reasons=False) for family in FAMILIES),
    *(Policy(family=family, reasons=True) for family in FAMILIES if family.name != "llama"),
    Policy(family=FAMILIES[0], reasons=True, twice=True),
]


@attrs.define(kw_only=True)
class Play:
    """What one run of a client left behind."""

    played: object = None
    run: object = None
    written: str | None = None
    exchanges: list = attrs.field(factory=list)
    failed: list = attrs.field(factory=list)
    engine: object = None


def play(client, policy, home):
    renderer, tokenizer = policy.family.load()
    engine = RecordingEngine(tokenizer, policy.script(client.steps))
    found = Play(engine=engine)

    def prepare(task, folder):
        (folder / NOTE).write_text(f"The note {LOOKED}.\n", encoding="utf-8")

    def reward(task, run):
        answer = run.folder / WRITTEN
        found.run = run
        found.written = answer.read_text(encoding="utf-8") if answer.exists() else None
        return 1.0

    async def rolled():
        async with RecordingProxy() as proxy:

            def command(task, session):
                proxy.upstream = session.anthropic_url
                return client.start(Address(url=proxy.url, key=session.key))

            environment = rollout.command_agent(
                command,
                tokenizer,
                reward=reward,
                prepare=prepare,
                renderer=renderer,
                variables={"HOME": str(home), "TMPDIR": str(home), "PYTHONPATH": ""},
                limits=AgentLimits(max_turns=12, timeout_s=TIMEOUT_S),
                keep_conversation=True,
            )
            try:
                task = {"id": "note", "prompt": TASK}
                params = SamplingParams(max_tokens=4096)
                found.played = await environment(task, engine, params)
            finally:
                found.exchanges = proxy.exchanges
                found.failed = proxy.failed
                await environment.aclose()

    asyncio.run(rolled())
    return found


def negotiates(exchange):
    """Whether a refusal is of the kind after which a client goes on without a feature."""
    return exchange.status == 426 or b"thread_unsupported_request" in exchange.answer


def has_reasoning(conversation):
    """Whether replies have reasoning apart from their text, which depends on the renderer."""
    messages = [message for branch in conversation["branches"] for message in branch["messages"]]
    return any(message.get("reasoning_content") for message in messages)


def results_in(text):
    return LOOKED in text and WROTE in text


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.id)
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.id)
def test_a_client_plays_to_its_end(client, policy, tmp_path, record_property, log):
    install(client.installation)

    found = play(client, policy, tmp_path)

    log(found)
    played, output = found.played, found.run.output
    ended = (found.run.exit_code, played.stop, DONE in output) == (0, "stop", True)
    number = len(played.samples) if ended else None
    record_property(ROW, row_of(client, policy, number))
    sent = [one.body or {} for one in found.exchanges]
    one_call = any(body.get("parallel_tool_calls") is False for body in sent)
    assert inexact(found.engine.requests, played.samples, cuts=one_call) == []
    errors = "\n".join(str(one) for one in found.failed if not negotiates(one))
    assert not errors, f"{errors}\n{output}"
    assert ended, (found.run.exit_code, played.stop, output)
    assert CODE.upper() in (found.written or ""), output
    assert played.metrics["turns"] == len(found.engine.requests)
    assert any(results_in(found.engine.tokenizer.decode(one.token_ids)) for one in played.samples)
    number = len(played.samples)
    expected = client.branches[0 if has_reasoning(played.conversation) else 1]
    assert number == played.metrics["branches"]
    assert number == expected, "\n".join(branches.reasons(played.conversation))
