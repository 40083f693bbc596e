"""verifiers environments: rollouts, samples, and files that are left behind."""

import asyncio
import gc
import importlib.metadata
import itertools
import json
import os
import random
import tempfile
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import attrs
import cloudpickle
import numpy as np
import pytest

pytest.importorskip("verifiers")
from primerl import rollout, testing
from primerl.rollout.conversations.calls import stitch
from primerl.rollout.environments.verifiers_adapter.trace_calls import SampledLogprobs, trace_calls
from primerl.rollout.renderers.template import TemplateRenderer
from primerl.types import NOT_SAMPLED, Completion, SamplingParams

HERE = Path(__file__).parents[2] / "helpers/verifiers_environments"
PARAMS = SamplingParams(max_tokens=32, temperature=0.7)


@pytest.fixture(autouse=True)
def _environments(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


@pytest.fixture(scope="module")
def tokenizer(smollm2_folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_folder)


class RandomEngine:
    """Tokens that no tokenizer would choose; each call starts a new version and ends in another."""

    def __init__(self, tokenizer, *, length=6, seed=0, context_length=4096):
        self.context_length = context_length
        self.version = 0
        self.calls = []
        self._eos, self._length = tokenizer.eos_token_id, length
        self._random = random.Random(seed)

    async def generate(self, prompt_ids, params, *, session=None):
        await asyncio.sleep(0)
        length = min(self._length, params.max_tokens)
        tokens = [self._random.randrange(300, 20000) for _ in range(length - 1)] + [self._eos]
        versions = [self.version] * (length // 2) + [self.version + 1] * (length - length // 2)
        self.version += 1
        logprobs = [-self._random.random() for _ in tokens]
        self.calls.append((list(prompt_ids), tokens, versions, session))
        return Completion(
            token_ids=tokens, logprobs=logprobs, versions=versions, finish_reason="stop"
        )


class TextEngine:
    """Gives scripted replies, one for each call."""

    version, context_length = 0, 4096

    def __init__(self, tokenizer, *lines):
        self._tokenizer, self._lines = tokenizer, iter(lines)
        self.prompts = []

    async def generate(self, prompt_ids, params, *, session=None):
        self.prompts.append(self._tokenizer.decode(prompt_ids))
        tokens = self._tokenizer.encode(next(self._lines), add_special_tokens=False)
        tokens.append(self._tokenizer.eos_token_id)
        return Completion(
            token_ids=tokens,
            logprobs=[-1.0] * len(tokens),
            versions=[0] * len(tokens),
            finish_reason="stop",
        )


def first(environment):
    return next(iter(environment.tasks))


def play(environment, engine, task=None, params=PARAMS):
    async def once():
        try:
            return await environment(task or first(environment), engine, params)
        finally:
            await environment.aclose()

    return asyncio.run(once())


# ---- what is trained


def node(parent, tokens, reply=None, version=0, routes=()):
    logprobs = []
    if reply is not None:
        logprobs = SampledLogprobs(
            Completion(
                token_ids=reply,
                logprobs=[-float(token) for token in reply],
                versions=[version] * len(reply),
                finish_reason="stop",
                routes=routes,
            )
        )
    tokens = [*tokens, *(reply or [])]
    return SimpleNamespace(
        parent=parent, token_ids=tokens, sampled=reply is not None, logprobs=logprobs
    )


def samples_of(nodes, temperature=1.0):
    return stitch(trace_calls(SimpleNamespace(nodes=nodes)), temperature=temperature)


def test_a_reply_that_branches_share_is_trained_once():
    nodes = [
        node(None, [1, 2]),
        node(0, [3], [4, 5], version=7),
        node(1, [6], [7], version=8),
        node(1, [8], [9], version=9),
    ]

    one, two = samples_of(nodes, temperature=0.5)

    assert one.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert one.loss_mask.tolist() == [False, False, False, True, True, False, True]
    assert one.versions.tolist() == [-1, -1, -1, 7, 7, -1, 8]
    assert one.behavior_logprobs.tolist() == [0, 0, 0, -4, -5, 0, -7]
    assert two.token_ids.tolist() == [1, 2, 3, 4, 5, 8, 9]
    assert two.loss_mask.tolist() == [False] * 6 + [True]
    assert two.versions.tolist() == [-1] * 6 + [9]
    assert one.temperature == two.temperature == 0.5


def test_a_branch_has_the_routes_of_all_replies_on_its_path():
    nodes = [
        node(None, [1, 2]),
        node(0, [3], [4, 5], routes=["a", "b"]),
        node(1, [6], [7], routes=["c"]),
        node(1, [8], [9], routes=["d"]),
        node(0, [3], [5], routes=["e"]),
    ]

    samples = samples_of(nodes)

    assert [one.routes for one in samples] == [("a", "b", "c"), ("a", "b", "d"), ("e",)]


def test_what_follows_the_last_reply_is_no_sample_and_in_none():
    nodes = [node(None, [1]), node(0, [2], [3]), node(1, [4]), node(1, [5])]

    (sample,) = samples_of(nodes)

    assert sample.token_ids.tolist() == [1, 2, 3]


def test_changed_tokens_are_refused():
    changed = node(0, [2], [3])
    changed.token_ids = [2, 4]

    with pytest.raises(ValueError, match="does not end with the tokens that were sampled"):
        samples_of([node(None, [1]), changed])


@pytest.mark.thorough
def test_twenty_turns_of_odd_tokens_are_one_sample(tokenizer):
    environment = rollout.verifiers("dungeon", tokenizer=tokenizer, config={"turns": 20})
    engine = RandomEngine(tokenizer)

    played = play(environment, engine)

    (sample,) = played.samples
    assert len(engine.calls) == 20
    last_prompt, last_reply, _, _ = engine.calls[-1]
    assert sample.token_ids.tolist() == last_prompt + last_reply
    assert sample.loss_mask.sum() == 20 * 6
    tokens = [token for _, reply, _, _ in engine.calls for token in reply]
    assert sample.token_ids[sample.loss_mask].tolist() == tokens
    versions = [version for _, _, versions, _ in engine.calls for version in versions]
    assert sample.versions[sample.loss_mask].tolist() == versions
    assert (sample.versions[~sample.loss_mask] == NOT_SAMPLED).all()
    assert (sample.behavior_logprobs[~sample.loss_mask] == 0).all()
    assert sample.temperature == 0.7
    assert {session for _, _, _, session in engine.calls} == {played.episode_id}
    assert played.metrics["turns"] == 20


def test_the_prompt_is_what_the_chat_template_makes_of_the_task(tokenizer):
    environment = rollout.verifiers("dungeon", tokenizer=tokenizer, config={"turns": 2})
    engine = TextEngine(tokenizer, "I look.", "I go.")

    played = play(environment, engine)

    chat = [
        {"role": "system", "content": "You are in a dungeon."},
        {"role": "user", "content": "Cell 0."},
        {"role": "assistant", "content": "I look."},
        {"role": "user", "content": "Room 1: a door."},
    ]
    assert engine.prompts[-1] == tokenizer.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )
    assert played.reward == 2 * len("I look." + "I go.") + 1
    assert played.metrics == {"turns": 2, "length": 12, "played": 1, "number": 0}
    assert (played.agent, played.stop) == ("player", "stop")


@pytest.mark.parametrize("way", ["hooks", "HTTP"])
def test_every_way_to_the_engine_gives_the_same_rollout(tokenizer, way):
    plain = rollout.verifiers("dungeon", tokenizer=tokenizer, max_turns=4, config={"turns": 6})
    if way == "hooks":
        other = rollout.verifiers(
            "hooked-dungeon", tokenizer=tokenizer, max_turns=4, config={"turns": 6}
        )
    else:
        config = {"turns": 6, "player": {"harness": {"id": "http-chat"}}}
        other = rollout.verifiers("dungeon", tokenizer=tokenizer, max_turns=4, config=config)
    tasks = list(itertools.islice(plain.tasks, 2))
    for task in tasks:
        one = play(plain, RandomEngine(tokenizer), task)
        two = play(other, RandomEngine(tokenizer), task)

        assert (one.reward, one.metrics, one.stop) == (two.reward, two.metrics, two.stop)
        assert one.stop == "max_turns"
        for a, b in zip(one.samples, two.samples, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            assert a.loss_mask.tolist() == b.loss_mask.tolist()
            assert a.versions.tolist() == b.versions.tolist()
            assert a.behavior_logprobs.tolist() == b.behavior_logprobs.tolist()


class RecordsRoutes(RandomEngine):
    """Its completions have routes; it records from where on they are asked for."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.starts = []

    async def generate(self, prompt_ids, params, *, session=None):
        completion = await super().generate(prompt_ids, params, session=session)
        self.starts.append(params.routes_start)
        return attrs.evolve(completion, routes=f"r:{len(self.calls) - 1}")


@pytest.mark.parametrize("way", ["plain", "hooks", "HTTP"])
def test_each_turn_asks_for_the_routes_that_are_not_known(tokenizer, way):
    name = "hooked-dungeon" if way == "hooks" else "dungeon"
    player = {"player": {"harness": {"id": "http-chat"}}} if way == "HTTP" else {}
    environment = rollout.verifiers(
        name, tokenizer=tokenizer, max_turns=3, config={"turns": 6, **player}
    )
    engine = RecordsRoutes(tokenizer)

    (sample,) = play(environment, engine).samples

    spoken = [len(prompt) + len(reply) for prompt, reply, _, _ in engine.calls]
    assert engine.starts == [0, spoken[0] - 1, spoken[1] - 1]
    assert sample.routes == ("r:0", "r:1", "r:2")


def test_a_conversation_that_is_rendered_anew_asks_for_all_routes(tokenizer):
    from renderers import DefaultRendererConfig

    environment = rollout.verifiers(
        "dungeon", tokenizer=tokenizer, renderer=DefaultRendererConfig()
    )
    engine = RecordsRoutes(tokenizer, length=30)

    samples = play(environment, engine).samples

    assert engine.starts == [0, 0, 0]
    assert [sample.routes for sample in samples] == [("r:0",), ("r:1",), ("r:2",)]


def test_after_a_reply_that_a_hook_changed_all_routes_are_asked_for(tokenizer):
    environment = rollout.verifiers("censored-dungeon", tokenizer=tokenizer, config={"turns": 9})
    engine = RecordsRoutes(tokenizer, length=20)

    samples = play(environment, engine).samples

    spoken = [len(prompt) + len(reply) for prompt, reply, _, _ in engine.calls]
    assert engine.starts == [0, spoken[0] - 1, 0, spoken[2] - 1]  # the second was censored
    assert [sample.routes for sample in samples] == [("r:0",), ("r:2", "r:3")]


def test_hooks_that_change_messages_mean_the_same_over_http(tokenizer):
    played, engines = [], []
    for player in ({}, {"harness": {"id": "http-chat"}}):
        environment = rollout.verifiers(
            "censored-dungeon", tokenizer=tokenizer, config={"turns": 9, "player": player}
        )
        engines.append(RandomEngine(tokenizer, length=20))
        played.append(play(environment, engines[-1]))

    one, two = played
    assert one.stop == two.stop == "after_four"
    assert (one.reward, one.metrics) == (two.reward, two.metrics)
    assert [s.token_ids.tolist() for s in one.samples] == [
        s.token_ids.tolist() for s in two.samples
    ]
    trained = [s.token_ids[s.loss_mask].tolist() for s in one.samples]
    assert trained == [s.token_ids[s.loss_mask].tolist() for s in two.samples]
    replies = [reply for _, reply, _, _ in engines[0].calls]
    assert trained == [replies[0], replies[2] + replies[3]]  # what was censored is not
    last_prompt = tokenizer.decode(engines[0].calls[3][0])
    assert "ROOM 1: A DOOR." in last_prompt
    assert "<|im_start|>assistant\n...<|im_end|>" in last_prompt


def test_a_renderer_without_a_bridge_makes_a_branch_of_each_turn(tokenizer):
    from renderers import DefaultRendererConfig

    environment = rollout.verifiers(
        "dungeon", tokenizer=tokenizer, renderer=DefaultRendererConfig()
    )
    engine = RandomEngine(tokenizer, length=30)

    played = play(environment, engine)

    assert len(played.samples) == 3
    for sample, (prompt, reply, _, _) in zip(played.samples, engine.calls, strict=True):
        assert sample.token_ids.tolist() == prompt + reply
        assert sample.token_ids[sample.loss_mask].tolist() == reply


def test_a_tokenizer_without_a_template_takes_the_text_unchanged(codes):
    environment = rollout.verifiers(
        "dungeon", tokenizer=codes, config={"taskset": {"system": None}, "turns": 2}
    )
    engine = RandomEngine(codes)

    (sample,) = play(environment, engine).samples

    text = codes.decode(sample.token_ids[~sample.loss_mask])
    assert text == "Cell 0.Room 1: a door."


def test_the_context_bounds_a_reply_and_then_the_rollout(tokenizer):
    environment = rollout.verifiers("dungeon", tokenizer=tokenizer, config={"turns": 50})
    engine = RandomEngine(tokenizer, context_length=120)

    played = play(environment, engine)

    assert played.stop == "context"
    assert max(len(sample.token_ids) for sample in played.samples) <= 120
    with pytest.raises(ValueError, match="is the prompt too long"):
        play(environment, RandomEngine(tokenizer, context_length=10))


def test_agents_that_are_not_trained_and_agents_to_choose_from(tokenizer):
    environment = rollout.verifiers("duel", tokenizer=tokenizer)
    with pytest.raises(ValueError, match=r"\['left', 'right'\] to train .* agent="):
        play(environment, RandomEngine(tokenizer))

    chosen = rollout.verifiers("duel", tokenizer=tokenizer, agent="right")
    engine = RandomEngine(tokenizer)
    played = play(chosen, engine)

    assert (played.agent, played.metrics["seat"]) == ("right", 5)
    (sample,) = played.samples
    assert sample.token_ids[sample.loss_mask].tolist() == engine.calls[1][1]


# ---- tools


def call(name, **arguments):
    said = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{said}\n</tool_call>"


def ports_in_files():
    """What tool servers reported, where the file is still there."""
    return [path.read_text() for path in Path("/tmp").glob("vf-port-*")]


@pytest.mark.usefixtures("home")
def test_tools_with_state_wrong_calls_and_deadlines(tokenizer):
    environment = rollout.verifiers("guessing", tokenizer=tokenizer)
    three, nine = environment.tasks
    lines = [
        f"Hm. {call('guess', n=5)}",
        call("guess", n=3),
        "It is 3.",
    ]
    wrong = [
        call("shout"),
        call("guess", m=5),
        call("fail"),
        "<tool_call>{'name'}</tool_call>",  # not JSON: a reply like any other, which ends it
    ]

    async def both():
        environment_engine = TextEngine(tokenizer, *lines)
        other_engine = TextEngine(tokenizer, *wrong)
        try:
            played = await asyncio.gather(
                environment(three, environment_engine, PARAMS),
                environment(nine, other_engine, PARAMS),
            )
            (running,) = environment._running.values()
            for tool in running._agents["agent"]._shared_tools.values():
                assert str(urlsplit(tool.url).port) not in ports_in_files()
            return (
                *played,
                environment_engine.prompts[-1],
                other_engine.prompts[-1],
            )
        finally:
            await environment.aclose()

    found, lost, prompt, other_prompt = asyncio.run(both())

    assert (found.reward, found.metrics["guesses"], found.metrics["turns"]) == (1.0, 2.0, 3.0)
    assert '"name": "guess", "description": "Guess the number."' in prompt
    assert "<|im_start|>tool\nlower<|im_end|>" in prompt
    assert "<|im_start|>tool\nright<|im_end|>" in prompt
    (sample,) = found.samples
    trained = tokenizer.decode(sample.token_ids[sample.loss_mask])
    assert trained == "".join(f"{line}<|im_end|>" for line in lines)
    assert lost.reward == 0.0
    assert "there is no tool 'shout', only ['fail', 'guess', 'sleep']" in other_prompt
    assert "no such luck" in other_prompt


def test_a_tool_that_does_not_answer_is_given_up():
    from primerl.rollout.environments.verifiers_adapter.tools import ServedTools

    class Silent:
        async def call_tool(self, name, arguments):
            await asyncio.sleep(600)

    box = ServedTools([], {"wait": (Silent(), "wait")}, 0.05)

    assert asyncio.run(box.call("wait", "{}")) == "error: wait did not answer within 0.05 s"
    assert asyncio.run(box.call("wait", "[1]")).startswith("error: the arguments are not an object")
    assert asyncio.run(box.call("wait", "{")).startswith("error: the arguments are not JSON")


# ---- renderer


def test_calls_are_parsed_only_where_there_are_tools(tokenizer):
    renderer = TemplateRenderer(tokenizer)
    tokens = tokenizer.encode(f"Let me see. {call('look', at='door')}")
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]

    parsed = renderer.parse_response(tokens, tools=tools)

    assert parsed.content == "Let me see."
    assert [(c.name, c.arguments) for c in parsed.tool_calls] == [("look", {"at": "door"})]
    assert renderer.parse_response(tokens).tool_calls == []
    broken = tokenizer.encode('<tool_call>{"name": 3}</tool_call>')
    parsed = renderer.parse_response(broken, tools=tools)
    assert [one.status for one in parsed.tool_calls] == ["the call is not an object with a 'name'"]
    assert "tool_call" in parsed.content


def test_a_bridge_adds_what_the_template_would(tokenizer):
    renderer = TemplateRenderer(tokenizer)
    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]
    new = [{"role": "user", "content": "Bye"}]
    prompt = renderer.render(chat[:1], add_generation_prompt=True).token_ids
    reply = tokenizer.encode("Hi.", add_special_tokens=False)
    whole = renderer.render([*chat, *new], add_generation_prompt=True).token_ids

    ended = [*reply, tokenizer.eos_token_id]

    assert [*prompt, *ended, *renderer.tokens_after(ended, new)] == whole
    assert [*prompt, *reply, *renderer.tokens_after(reply, new)] == whole
    assert renderer.tokens_after(reply, chat) is None


TEMPLATES = {
    "Llama": (
        "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\n"
        "{{ m.content | trim }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
    ),
    "Mistral": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
        "[INST] {{ m.content }} [/INST]{% else %}{{ m.content }}{{ eos_token }}{% endif %}"
        "{% endfor %}"
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_bridge_follows_templates_of_other_kinds(smollm2_folder, name):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    tokenizer.chat_template = TEMPLATES[name]
    renderer = TemplateRenderer(tokenizer)
    chat = [{"role": "user", "content": "Hello"}]
    tokens = renderer.render(chat, add_generation_prompt=True).token_ids
    for turn in range(3):
        reply = [*tokenizer.encode(f"Reply {turn}."), tokenizer.eos_token_id]
        chat.append({"role": "assistant", "content": f"Reply {turn}."})
        chat.append({"role": "user", "content": f"Question {turn}?"})
        tokens = [*tokens, *reply, *renderer.tokens_after(reply, chat[-1:])]

    whole = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(tokens) == whole


def test_earlier_calls_are_text_for_a_template_that_knows_none(tokenizer):
    function = {"name": "look", "arguments": '{"at": "door"}'}
    said = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}

    tokens = TemplateRenderer(tokenizer).render([said]).token_ids

    assert call("look", at="door") in tokenizer.decode(tokens)


# ---- errors


FAULTS = {
    "setup": (RuntimeError, "faulty/0.*TaskError: task setup: KeyError: 'no such room'"),
    "reward": (RuntimeError, "ZeroDivisionError: bad arithmetic"),
    "stop": (RuntimeError, "OSError: stop hook"),
    "nan": (ValueError, "reward is nan"),
}


@pytest.mark.parametrize("where", FAULTS)
def test_what_fails_in_the_environment_is_raised_with_its_cause(tokenizer, where):
    kind, message = FAULTS[where]
    config = {"taskset": {"where": where}}
    environment = rollout.verifiers("faulty", tokenizer=tokenizer, config=config)

    with pytest.raises(kind, match=message):
        play(environment, RandomEngine(tokenizer))


def test_an_error_of_the_engine_is_raised_unchanged(tokenizer):
    class Broken(RandomEngine):
        async def generate(self, prompt_ids, params, *, session=None):
            raise ConnectionError("the server is gone")

    for name in ("faulty", "dungeon", "hooked-dungeon"):
        environment = rollout.verifiers(name, tokenizer=tokenizer)
        with pytest.raises(ConnectionError, match="the server is gone"):
            play(environment, Broken(tokenizer))


@pytest.mark.parametrize("where", ["hanging setup", "hanging reward"])
def test_a_rollout_has_a_deadline(tokenizer, where):
    environment = rollout.verifiers(
        "faulty", tokenizer=tokenizer, timeout_s=0.3, config={"taskset": {"where": where}}
    )

    with pytest.raises(TimeoutError, match="took longer than timeout_s=0.3"):
        play(environment, RandomEngine(tokenizer))


def test_the_environments_own_deadline_on_scoring_is_no_reward_of_zero(tokenizer):
    config = {"taskset": {"where": "hanging reward"}, "agent": {"timeout": {"scoring": 0.2}}}
    environment = rollout.verifiers("faulty", tokenizer=tokenizer, config=config)

    with pytest.raises(TimeoutError, match="scoring_timeout"):
        play(environment, RandomEngine(tokenizer))


def test_the_environments_own_timeout_of_an_agent_ends_the_rollout(tokenizer):
    class Slow(RandomEngine):
        async def generate(self, prompt_ids, params, *, session=None):
            if self.calls:
                await asyncio.sleep(600)
            return await super().generate(prompt_ids, params, session=session)

    config = {"player": {"timeout": {"rollout": 0.2}}}
    environment = rollout.verifiers("dungeon", tokenizer=tokenizer, config=config)

    played = play(environment, Slow(tokenizer))

    assert (played.stop, played.metrics["turns"]) == ("agent_timeout", 1)
    assert played.samples[0].loss_mask.sum() == 6


def test_a_stop_before_the_first_turn_leaves_nothing_to_train(tokenizer):
    environment = rollout.verifiers(
        "faulty", tokenizer=tokenizer, config={"taskset": {"where": "stopped"}}
    )

    with pytest.raises(ValueError, match="the policy sampled no token .stop: enough."):
        play(environment, RandomEngine(tokenizer))


def test_a_missing_environment_says_how_to_install_it(tokenizer):
    with pytest.raises(ValueError, match="no environment 'no-such'.*from its author's source"):
        rollout.verifiers("no-such", tokenizer=tokenizer)
    with pytest.raises(ValueError, match="prime env install acme/no-such@1.0"):
        rollout.verifiers("acme/no-such@1.0", tokenizer=tokenizer)
    with pytest.raises(ValueError, match="dungeon has no dataset, game, .* to choose.*'system'"):
        rollout.verifiers("dungeon:deep", tokenizer=tokenizer)
    with pytest.raises(ValueError, match="sistem"):
        rollout.verifiers("dungeon", tokenizer=tokenizer, config={"taskset": {"sistem": ""}})


# ---- the choice after the colon


@pytest.mark.parametrize(
    ("name", "option", "value", "prompt"),
    [
        ("arcade:echo", "game", "echo", "Say it back: abc"),
        ("acme/arcade@1.0:reverse", "game", "reverse", "Reverse it: abc"),
        ("tower:2", "floor", 2, "Floor 2"),
    ],
)
def test_an_id_chooses_the_tasks_after_its_colon(tokenizer, name, option, value, prompt):
    environment = rollout.verifiers(name, tokenizer=tokenizer)
    assert getattr(environment.load().taskset.config, option) == value
    assert first(environment)["id"] == f"{name}/0"
    assert first(environment)["prompt"] == prompt


def test_the_choice_is_kept_in_another_process(tokenizer):
    environment = rollout.verifiers("arcade:reverse", tokenizer=tokenizer)
    copy = cloudpickle.loads(cloudpickle.dumps(environment))
    assert play(copy, TextEngine(tokenizer, "cba")).reward == 1.0


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        ("arcade:revers", {}, "arcade has no game 'revers'; there are echo, reverse; .*: reverse"),
        ("tower:9", {}, "tower has no floor '9'; there are 1, 2, 3"),
        ("arcade", {}, "name one game of arcade, as in 'arcade:echo'; there are echo, reverse"),
        ("tower", {}, "name one floor of tower, as in 'tower:1'"),
        ("nemo-gym", {}, "name one dataset of nemo-gym after a colon"),
        ("arcade:", {}, "'arcade:' names nothing after the colon"),
        ("arcade:echo", {"game": "reverse"}, "names the game 'echo', but the config .*'reverse'"),
    ],
)
def test_a_choice_that_is_unknown_missing_or_double_is_refused(tokenizer, name, config, expected):
    with pytest.raises(ValueError, match=expected):
        rollout.verifiers(name, tokenizer=tokenizer, config={"taskset": config})


def test_the_config_may_make_the_choice(tokenizer):
    for name in ("arcade", "arcade:echo"):
        config = {"taskset": {"game": "echo", "word": "xyz"}}
        environment = rollout.verifiers(name, tokenizer=tokenizer, config=config)
        assert first(environment)["prompt"] == "Say it back: xyz"


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("harbor:acme/tasks", "dataset"),
        ("nemo-gym:rows.jsonl", "dataset"),
        ("openenv:acme/e", "env"),
    ],
)
def test_the_tasksets_of_verifiers_take_a_choice(tokenizer, name, option):
    environment = rollout.verifiers(name, tokenizer=tokenizer)
    assert str(getattr(environment.load().taskset.config, option)) == name.partition(":")[2]


def test_textarena_plays_the_game_that_the_id_names(tokenizer, tmp_path, monkeypatch):
    nltk = pytest.importorskip("nltk", reason="nltk is not installed")
    monkeypatch.setattr(nltk, "download", lambda *_, **__: False)
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    pytest.importorskip("textarena", reason="textarena is not installed")
    words = tmp_path / "corpora" / "words"
    words.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (words / name).write_text("cat\n")

    environment = rollout.verifiers("textarena:Hangman-v0", tokenizer=tokenizer)

    assert "Hangman" in first(environment)["prompt"]
    played = play(environment, TextEngine(tokenizer, "[c]", "[a]", "[t]"))
    assert played.reward == 1.0
    assert played.metrics["turns"] == 3
    with pytest.raises(ValueError, match="textarena has no game 'Chess-v0'; there are Wordle-v0, "):
        rollout.verifiers("textarena:Chess-v0", tokenizer=tokenizer)
    with pytest.raises(ValueError, match="name one game of textarena, as in 'textarena:Wordle-v0'"):
        rollout.verifiers("textarena", tokenizer=tokenizer)


def test_a_package_that_is_no_environment_is_named(tokenizer):
    with pytest.raises(ValueError, match="json is installed, but it is not an environment of"):
        rollout.verifiers("json", tokenizer=tokenizer)
    with pytest.raises(ValueError, match="outdated is installed, but .*verifiers.utils"):
        rollout.verifiers("outdated", tokenizer=tokenizer)
    with pytest.raises(ImportError, match="needs a_package_that_nobody_has, which is not instal"):
        rollout.verifiers("needy", tokenizer=tokenizer)


def test_an_unknown_agent_is_refused(tokenizer):
    with pytest.raises(ValueError, match=r"no agent 'agent' to train; its agents are \['player'\]"):
        rollout.verifiers("dungeon", tokenizer=tokenizer, agent="agent")


def test_another_version_of_verifiers_is_refused(tokenizer, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.5.1")

    with pytest.raises(ImportError, match="verifiers 0.5.1 is installed, expected >=0.4,<0.5"):
        rollout.verifiers("dungeon", tokenizer=tokenizer)


def test_a_task_from_elsewhere_is_refused(tokenizer):
    environment = rollout.verifiers("dungeon", tokenizer=tokenizer)

    with pytest.raises(ValueError, match="no 'data'.*take tasks from .tasks"):
        play(environment, RandomEngine(tokenizer), {"id": "1", "prompt": "Hello"})


# ---- tasks, processes and what is left behind


def test_tasks_are_plain_stable_and_endless(tokenizer):
    environment = rollout.verifiers("acme/dungeon@0.1", tokenizer=tokenizer)

    tasks = list(itertools.islice(environment.tasks, 300))

    assert tasks[:5] == list(itertools.islice(environment.tasks, 5))
    assert json.loads(json.dumps(tasks)) == tasks
    assert len({task["id"] for task in tasks}) == 300
    assert tasks[7]["prompt"] == "Cell 7."
    assert play(environment, RandomEngine(tokenizer), tasks[7]).metrics["number"] == 7


def test_the_environment_survives_pickling_before_and_after_use(tokenizer):
    environment = rollout.verifiers("dungeon", tokenizer=tokenizer)
    before = play(environment, RandomEngine(tokenizer))

    again = play(cloudpickle.loads(cloudpickle.dumps(environment)), RandomEngine(tokenizer))

    assert again.samples[0].token_ids.tolist() == before.samples[0].token_ids.tolist()
    assert len(cloudpickle.dumps(environment.tasks)) > 0


class Held(RandomEngine):
    """Answers when it is told to."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self.waiting, self.go = 0, asyncio.Event()

    async def generate(self, prompt_ids, params, *, session=None):
        self.waiting += 1
        await self.go.wait()
        return await super().generate(prompt_ids, params, session=session)

    async def all_waiting(self, count):
        async with asyncio.timeout(20):
            while self.waiting < count:
                await asyncio.sleep(0.01)


def leftovers():
    from verifiers.v1.utils.paths import CACHE_DIR

    return sorted(Path(tempfile.gettempdir()).iterdir()), sorted(CACHE_DIR.glob("runtimes/*/*"))


def test_cancelled_and_finished_rollouts_leave_no_files(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config = {"taskset": {"where": "folder"}}
    environment = rollout.verifiers("faulty", tokenizer=tokenizer, config=config)
    task, before = first(environment), leftovers()

    async def main():
        engine = Held(tokenizer)
        playing = [asyncio.create_task(environment(task, engine, PARAMS)) for _ in range(5)]
        await engine.all_waiting(5)
        assert len(leftovers()[0]) == 5
        for one in playing[:4]:
            one.cancel()
        cancelled = await asyncio.gather(*playing[:4], return_exceptions=True)
        engine.go.set()
        finished = await playing[4]
        await environment.aclose()
        return cancelled, finished, asyncio.all_tasks() - {asyncio.current_task()}

    cancelled, finished, running = asyncio.run(main())

    assert all(isinstance(error, asyncio.CancelledError) for error in cancelled)
    assert finished.reward == len(b"left behind")
    assert leftovers() == before
    assert not running


@pytest.mark.thorough
def test_a_rollout_in_flight_takes_less_than_300_kb_and_no_files(tokenizer):
    environment = rollout.verifiers("faulty", tokenizer=tokenizer)
    task, count = first(environment), 200

    def resident():
        gc.collect()
        return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf(
            "SC_PAGE_SIZE"
        )

    async def main():
        await environment(task, RandomEngine(tokenizer), PARAMS)  # what is set up once
        engine = Held(tokenizer)
        size, files = resident(), len(os.listdir("/proc/self/fd"))
        playing = [asyncio.create_task(environment(task, engine, PARAMS)) for _ in range(count)]
        await engine.all_waiting(count)
        grown = resident() - size, len(os.listdir("/proc/self/fd")) - files
        engine.go.set()
        await asyncio.gather(*playing)
        await environment.aclose()
        return grown

    size, files = asyncio.run(main())

    assert size / count < 300_000
    assert files == 0


def test_rollouts_at_once_do_not_mix(tokenizer):
    environment = rollout.verifiers("dungeon", tokenizer=tokenizer)
    tasks = list(itertools.islice(environment.tasks, 50))

    async def main():
        engines = [RandomEngine(tokenizer, seed=seed) for seed in range(50)]
        played = await asyncio.gather(
            *(
                environment(task, engine, PARAMS)
                for task, engine in zip(tasks, engines, strict=True)
            )
        )
        await environment.aclose()
        return engines, played

    engines, played = asyncio.run(main())

    for number, (engine, one) in enumerate(zip(engines, played, strict=True)):
        assert one.metrics["number"] == number
        (sample,) = one.samples
        tokens = np.concatenate([reply for _, reply, _, _ in engine.calls])
        assert sample.token_ids[sample.loss_mask].tolist() == tokens.tolist()


@pytest.mark.thorough
def test_it_is_played_in_the_workers_process_and_in_processes_of_its_own(codes):
    environment = rollout.verifiers("dungeon", tokenizer=codes, config={"turns": 3})
    engine = testing.ScriptedEngine([[50, 51], [52]])
    held_out, train = environment.tasks.split(2)
    params = SamplingParams(max_tokens=4, stop_token_ids=(1,))
    with rollout.worker(
        engine,
        rollout.isolated(environment, processes=1),
        train,
        params=params,
        group_size=2,
        groups_per_step=2,
        max_staleness=0,
    ) as rollouts:
        groups = rollouts.take(version=0)
        scored = rollouts.evaluate(held_out, attrs.evolve(params, temperature=0))

    assert [group.task_id for group in groups] == ["dungeon/2", "dungeon/3"]
    assert [one.metrics["number"] for one in scored] == [0.0, 1.0]
    assert {one.metrics["turns"] for group in groups for one in group.rollouts} == {3.0}
