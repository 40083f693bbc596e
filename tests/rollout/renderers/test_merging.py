"""Messages that a template does not take are merged by rules that depend on the template only."""

import pytest
from chat_tokenizer import chat_tokenizer

from primerl.rollout.renderers.template import TemplateRenderer

STRICT = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}"
    "{% set rest = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "[{{ m.role }}]{{ system if loop.first else '' }}{{ m.content }}{% endfor %}"
)
NO_SYSTEM = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
FIRST_ONLY = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}"
    "[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)
ANY = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def text(template, *messages):
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = template
    renderer = TemplateRenderer(tokenizer)
    said = [{"role": role, "content": content} for role, content in messages]
    return tokenizer.decode(renderer.render(said).token_ids)


MESSAGES = [
    ("system", "A"),
    ("system", "B"),
    ("user", "c"),
    ("user", "d"),
    ("assistant", "e"),
    ("system", "F"),
    ("user", "g"),
]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (STRICT, "[user]A\n\nB\n\nc\n\nd[assistant]e[user]F\n\ng"),
        (NO_SYSTEM, "[user]A\n\nB[user]c[user]d[assistant]e[user]F[user]g"),
        (FIRST_ONLY, "[system]A\n\nB[user]c[user]d[assistant]e[user]F[user]g"),
        (ANY, "[system]A[system]B[user]c[user]d[assistant]e[system]F[user]g"),
    ],
    ids=["strict", "no system", "first system only", "any"],
)
def test_messages_are_merged_as_the_template_needs_it(template, expected):
    assert text(template, *MESSAGES) == expected


def test_messages_that_the_template_takes_stay_as_they_are():
    assert text(STRICT, ("system", "A"), ("user", "b")) == "[user]A\n\nb"
    assert text(NO_SYSTEM, ("user", "a"), ("assistant", "b")) == "[user]a[assistant]b"


def test_what_no_rule_mends_is_still_refused():
    with pytest.raises(Exception, match="roles must alternate"):
        text(STRICT, ("user", "a"), ("assistant", "b"), ("assistant", "c"))


def test_turns_after_a_reply_are_merged_too():
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = STRICT + "{% if add_generation_prompt %}[assistant]{% endif %}"
    renderer = TemplateRenderer(tokenizer)
    reply = tokenizer.encode("Well.", add_special_tokens=False)
    new = [{"role": "system", "content": "F"}, {"role": "user", "content": "g"}]
    assert tokenizer.decode(renderer.tokens_after(reply, new)) == "[user]F\n\ng[assistant]"


SKIPS_TOOLS = (
    "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}"
    "[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (SKIPS_TOOLS, "[user]<tool_response>\nopen\n</tool_response>"),
        (STRICT, "[user]<tool_response>\nopen\n</tool_response>"),
        (ANY, "[tool]open"),
    ],
)
def test_results_reach_the_policy_through_templates_that_skip_them(template, expected):
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = template
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "open", "tool_call_id": "c"},
    ]
    rendered = TemplateRenderer(tokenizer).render(messages)
    assert tokenizer.decode(rendered.token_ids).endswith(expected)


CALLS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{% for name, value in call.function.arguments | items %}"
    "<{{ name }}={{ value }}>{% endfor %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("arguments", ['{"at": "door"}', {"at": "door"}])
def test_templates_get_the_arguments_of_calls_as_objects(arguments):
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = CALLS
    call = {"id": "c", "type": "function", "function": {"name": "x", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    rendered = TemplateRenderer(tokenizer).render(messages)
    assert tokenizer.decode(rendered.token_ids) == "[user]?[assistant]<at=door>"
    assert call["function"]["arguments"] == arguments
