"""The clients: the packages that they need, and how each is started on the task."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import attrs
from families import Call
from installation import Installation
from scripted_policy import CODE, DONE, NOTE, TASK, WRITTEN, WROTE, Steps

DRIVERS = Path(__file__).parents[1] / "drivers"
STEPS = Steps(
    look=Call(name="look", arguments={"path": NOTE}),
    write=Call(name="write", arguments={"path": WRITTEN, "text": CODE}),
)
CAT = f"cat {NOTE}"
COPY = f"sed 's/{CODE}/{CODE.upper()}/w {WRITTEN}' {NOTE}"  # it also prints what it writes

NODE = "node@22.23.3"  # today's clients need a newer one than many machines have
INSTALLATIONS = {
    one.name: one
    for one in [
        Installation(
            name="python-sdks",
            manager="pip",
            pins=("openai==3.57.0", "anthropic==2.14.0"),
        ),
        Installation(
            name="javascript-sdks",
            manager="npm",
            pins=(NODE, "openai@7.59.0", "@anthropic-ai/sdk@1.14.0"),
        ),
        Installation(
            name="codex",
            manager="npm",
            pins=(NODE, "@openai/codex@0.171.0"),
        ),
        Installation(
            name="qwen-code",
            manager="npm",
            pins=(NODE, "@qwen-code/qwen-code@0.24.4"),
        ),
        Installation(
            name="opencode",
            manager="npm",
            pins=(NODE, "opencode-ai@1.18.33"),
        ),
        Installation(
            name="openai-agents",
            manager="pip",
            pins=("openai-agents==0.24.0", "openai==3.57.0"),
        ),
        Installation(
            name="pydantic-ai",
            manager="pip",
            pins=(
                "pydantic-ai-slim[openai,anthropic]==2.66.0",
                "openai==3.57.0",
                "anthropic==2.14.0",
            ),
        ),
        Installation(
            name="langgraph",
            manager="pip",
            pins=(
                "langgraph==1.2.24",
                "langchain==1.5.2",
                "langchain-openai==1.7.4",
                "langchain-anthropic==1.7.10",
                "openai==3.57.0",
                "anthropic==2.14.0",
            ),
        ),
        Installation(
            name="litellm",
            manager="pip",
            pins=("litellm==1.110.2", "openai==3.57.0"),
        ),
        Installation(
            name="strands",
            manager="pip",
            pins=(
                "strands-agents[openai,anthropic]==1.62.0",
                "openai==2.54.0",
                "anthropic==0.125.0",
            ),
        ),
        Installation(
            name="crewai",
            manager="pip",
            pins=("crewai[anthropic]==1.15.30", "openai==2.54.0", "anthropic==0.73.0"),
        ),
        Installation(
            name="mini-swe-agent",
            manager="pip",
            pins=("mini-swe-agent==2.4.6", "litellm==1.110.2", "openai==3.57.0"),
        ),
        Installation(name="aider", manager="pip", pins=("aider-chat==0.86.2",)),
        Installation(
            name="ai-sdk",
            manager="npm",
            pins=(
                NODE,
                "ai@7.0.173",
                "@ai-sdk/openai@4.0.118",
                "@ai-sdk/anthropic@4.0.105",
                "@ai-sdk/openai-compatible@3.0.92",
                "zod@4.6.7",
            ),
        ),
    ]
}

QUIET = {  # none of these reports to its makers, or waits for a network that is not there
    "AIDER_ANALYTICS": "false",
    "AIDER_CHECK_UPDATE": "false",
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_DISABLE_VERSION_CHECK": "true",
    "DO_NOT_TRACK": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "true",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "OTEL_SDK_DISABLED": "true",
}
DROPS_REASONING = (3, 1)  # it never sends reasoning back, so that each turn begins a branch


@attrs.frozen(kw_only=True)
class Address:
    """The gateway's address: ``base_url`` ends in ``/v1``, ``url`` does not."""

    url: str
    key: str

    @property
    def base_url(self):
        return f"{self.url}/v1"


@attrs.frozen(kw_only=True)
class Client:
    """One client with one API, streamed or not.

    ``command`` starts it, with the environment variables that ``variables`` adds for an address.
    ``setting`` says in words what it needs besides a base URL and a key. ``steps`` are the
    policy's. ``branches`` are the least numbers of branches, of replies with reasoning and of
    replies without.
    """

    name: str
    package: str
    installation: Installation
    api: str
    streamed: bool
    command: Callable[[Address], list[str]]
    variables: Callable[[Address], dict[str, str]] = lambda gateway: {}
    steps: Steps = STEPS
    setting: str = ""
    branches: tuple[int, int] = (1, 1)

    @property
    def id(self):
        return f"{self.name}-{self.api}-{'streamed' if self.streamed else 'whole'}"

    @property
    def version(self):
        return self.installation.version(self.package)

    def start(self, gateway):
        """Return the command that plays the task, with its environment variables."""
        variables = {
            **QUIET,
            "PATH": f"{self.installation.bin}:{os.environ['PATH']}",
            "OPENAI_BASE_URL": gateway.base_url,
            "OPENAI_API_BASE": gateway.base_url,
            "ANTHROPIC_BASE_URL": gateway.url,
            "AGENT_API": self.api,
            "AGENT_STREAMED": "yes" if self.streamed else "no",
            "AGENT_TASK": TASK,
            **self.variables(gateway),
        }
        return ["env", *(f"{k}={v}" for k, v in variables.items()), *self.command(gateway)]


def driven(name, package, installation, driver, apis, *, streamed=(False, True), **fields):
    """Return the clients that one of ``drivers`` plays."""
    chosen = INSTALLATIONS[installation]

    def command(gateway):
        if chosen.manager == "pip":
            return [str(chosen.bin / "python"), str(DRIVERS / driver)]
        copied = chosen.folder / "drivers"  # node looks for packages beside and above a script
        shutil.copytree(DRIVERS, copied, dirs_exist_ok=True)
        return [str(chosen.bin / "node"), str(copied / driver)]

    return [
        Client(
            name=name,
            package=package,
            installation=chosen,
            api=api,
            streamed=one,
            command=command,
            **fields,
        )
        for api in apis
        for one in streamed
    ]


def toml(value):
    """Return a mapping of texts as an inline table of TOML."""
    return "{" + ", ".join(f"{key} = {json.dumps(text)}" for key, text in value.items()) + "}"


def codex(*options):
    """Return the command of Codex, whose own sandbox is off: it needs privileges of its own."""
    return [
        "codex",
        "exec",
        "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox",
        *options,
        TASK,
    ]


def codex_with_base_url(gateway):
    return codex("-c", f"openai_base_url={json.dumps(gateway.base_url)}")


def codex_with_provider(gateway):
    provider = {
        "name": "gateway",
        "base_url": gateway.base_url,
        "env_key": "OPENAI_API_KEY",
        "wire_api": "responses",
    }
    return codex(
        *("-c", f"model_providers.gateway={toml(provider)}"),
        *("-c", 'model_provider="gateway"'),
        *("-m", "policy"),
    )


def script_of_codex(command):
    """Return JavaScript that runs a command: the tool that Codex gives to its newest models."""
    return (
        f"const done = await tools.exec_command({json.dumps({'cmd': command})}); text(done.output);"
    )


QWEN_CODE = [
    Client(
        name="Qwen Code",
        package="@qwen-code/qwen-code",
        installation=INSTALLATIONS["qwen-code"],
        api=api,
        streamed=True,
        command=lambda gateway, kind=kind: [
            *("qwen", "--yolo", "--auth-type", kind, "--model", "policy"),
            TASK,
        ],
        setting=f"`--auth-type {kind}`",
        steps=Steps(
            look=Call(name="run_shell_command", arguments={"command": CAT}),
            write=Call(name="run_shell_command", arguments={"command": COPY}),
        ),
    )
    for api, kind in {
        "chat": "openai",
        "responses": "openai-responses",
        "messages": "anthropic",
    }.items()
]


def opencode(name, api, config, model, setting):
    """Return opencode with a configuration: a function of the gateway's address."""
    return Client(
        name=name,
        package="opencode-ai",
        installation=INSTALLATIONS["opencode"],
        api=api,
        streamed=True,
        command=lambda gateway: ["opencode", "run", "--auto", "--model", model, TASK],
        variables=lambda gateway: {"OPENCODE_CONFIG_CONTENT": json.dumps(config(gateway))},
        setting=setting,
        branches=(2, 2),  # one is the request for a title
        steps=Steps(
            look=Call(name="bash", arguments={"command": CAT}),
            write=Call(name="bash", arguments={"command": COPY}),
        ),
    )


def provider_of_opencode(name, package, gateway):
    options = {"baseURL": gateway.base_url, "apiKey": gateway.key}
    models = {"policy": {"name": "Policy"}}
    return {"provider": {name: {"npm": package, "options": options, "models": models}}}


OPENCODE = [
    opencode(
        "opencode",
        api,
        lambda gateway, name=name, package=package: provider_of_opencode(name, package, gateway),
        f"{name}/policy",
        f"a provider of {package} in its configuration",
    )
    for api, name, package in [
        ("chat", "gateway", "@ai-sdk/openai-compatible"),
        ("responses", "openai", "@ai-sdk/openai"),
        ("messages", "anthropic", "@ai-sdk/anthropic"),
    ]
]


def mini_swe_agent(gateway):
    return ["mini", "--yolo", "--exit-immediately", "--model", "openai/policy", "--task", TASK]


def aider(*options):
    """Return the command of aider, in a repository of git whose files it may read."""
    commit = "git init -q && git add . && git -c user.name=a -c user.email=a@b commit -qm Note"
    task = "Find the code in the note and write it down."
    start = ["aider", "--model", "openai/policy", "--yes-always", *options, "--message", task]
    return ["sh", "-c", f'{commit} && exec "$@"', "sh", *start]


CLIENTS = [
    *driven("openai Python", "openai", "python-sdks", "openai_chat.py", ["chat"]),
    *driven("openai Python", "openai", "python-sdks", "openai_responses.py", ["responses"]),
    *driven(
        "openai Python, previous_response_id",
        "openai",
        "python-sdks",
        "openai_continued.py",
        ["responses"],
    ),
    *driven(
        "openai Python tool runner",
        "openai",
        "python-sdks",
        "openai_responses_runner.py",
        ["responses"],
    ),
    *driven("anthropic Python", "anthropic", "python-sdks", "anthropic_messages.py", ["messages"]),
    *driven(
        "anthropic Python tool runner",
        "anthropic",
        "python-sdks",
        "anthropic_runner.py",
        ["messages"],
    ),
    *driven("openai JavaScript", "openai", "javascript-sdks", "openai_chat.mjs", ["chat"]),
    *driven(
        "openai JavaScript tool runner",
        "openai",
        "javascript-sdks",
        "openai_runner.mjs",
        ["chat"],
        branches=DROPS_REASONING,
    ),
    *driven(
        "openai JavaScript",
        "openai",
        "javascript-sdks",
        "openai_responses.mjs",
        ["responses"],
    ),
    *driven(
        "openai JavaScript tool runner",
        "openai",
        "javascript-sdks",
        "openai_responses_runner.mjs",
        ["responses"],
    ),
    *driven(
        "anthropic JavaScript",
        "@anthropic-ai/sdk",
        "javascript-sdks",
        "anthropic_messages.mjs",
        ["messages"],
    ),
    *driven(
        "anthropic JavaScript tool runner",
        "@anthropic-ai/sdk",
        "javascript-sdks",
        "anthropic_runner.mjs",
        ["messages"],
    ),
    *driven(
        "AI SDK, @ai-sdk/openai",
        "@ai-sdk/openai",
        "ai-sdk",
        "ai_sdk.mjs",
        ["chat"],
        variables=lambda gateway: {"AGENT_PROVIDER": "openai"},
        branches=DROPS_REASONING,
    ),
    *driven(
        "AI SDK, @ai-sdk/openai",
        "@ai-sdk/openai",
        "ai-sdk",
        "ai_sdk.mjs",
        ["responses"],
        variables=lambda gateway: {"AGENT_PROVIDER": "openai"},
    ),
    *driven(
        "AI SDK, @ai-sdk/anthropic",
        "@ai-sdk/anthropic",
        "ai-sdk",
        "ai_sdk.mjs",
        ["messages"],
        variables=lambda gateway: {
            "AGENT_PROVIDER": "anthropic",
            "ANTHROPIC_BASE_URL": gateway.base_url,
        },
        setting="`ANTHROPIC_BASE_URL` that ends in `/v1`",
    ),
    *driven(
        "AI SDK, @ai-sdk/openai-compatible",
        "@ai-sdk/openai-compatible",
        "ai-sdk",
        "ai_sdk.mjs",
        ["chat"],
        variables=lambda gateway: {"AGENT_PROVIDER": "openai-compatible"},
    ),
    Client(
        name="Codex",
        package="@openai/codex",
        installation=INSTALLATIONS["codex"],
        api="responses",
        streamed=True,
        command=codex_with_base_url,
        variables=lambda gateway: {"CODEX_API_KEY": gateway.key},
        setting="`openai_base_url`",
        steps=Steps(
            look=Call(name="exec", arguments={"input": script_of_codex(CAT)}),
            write=Call(name="exec", arguments={"input": script_of_codex(COPY)}),
        ),
    ),
    Client(
        name="Codex with a provider",
        package="@openai/codex",
        installation=INSTALLATIONS["codex"],
        api="responses",
        streamed=True,
        command=codex_with_provider,
        setting="`model_provider` with a base URL, and a model's name",
        steps=Steps(
            look=Call(name="exec_command", arguments={"cmd": CAT}),
            write=Call(name="exec_command", arguments={"cmd": COPY}),
        ),
    ),
    *QWEN_CODE,
    *OPENCODE,
    *driven(
        "OpenAI Agents SDK",
        "openai-agents",
        "openai-agents",
        "openai_agents.py",
        ["chat"],
        branches=DROPS_REASONING,
    ),
    *driven(
        "OpenAI Agents SDK",
        "openai-agents",
        "openai-agents",
        "openai_agents.py",
        ["responses"],
    ),
    *driven(
        "Pydantic AI",
        "pydantic-ai-slim",
        "pydantic-ai",
        "pydantic_agent.py",
        ["chat", "responses", "messages"],
    ),
    *driven(
        "LangGraph",
        "langgraph",
        "langgraph",
        "langchain_agent.py",
        ["chat"],
        branches=DROPS_REASONING,
    ),
    *driven(
        "LangGraph",
        "langgraph",
        "langgraph",
        "langchain_agent.py",
        ["responses", "messages"],
    ),
    *driven("LiteLLM", "litellm", "litellm", "litellm_chat.py", ["chat", "messages"]),
    *driven(
        "Strands Agents",
        "strands-agents",
        "strands",
        "strands_agent.py",
        ["chat", "responses"],
        streamed=[True],
        branches=DROPS_REASONING,
    ),
    *driven(
        "Strands Agents",
        "strands-agents",
        "strands",
        "strands_agent.py",
        ["messages"],
        streamed=[True],
    ),
    *driven(
        "CrewAI",
        "crewai",
        "crewai",
        "crewai_crew.py",
        ["chat", "messages"],
        branches=DROPS_REASONING,
    ),
    *driven(
        "CrewAI",
        "crewai",
        "crewai",
        "crewai_crew.py",
        ["responses"],
        streamed=[False],  # its stream forgets the calls of a reply that also has text
        branches=DROPS_REASONING,
    ),
    Client(
        name="mini-swe-agent",
        package="mini-swe-agent",
        installation=INSTALLATIONS["mini-swe-agent"],
        api="chat",
        streamed=False,
        command=mini_swe_agent,
        variables=lambda gateway: {
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
        },
        setting="`MSWEA_COST_TRACKING=ignore_errors`",
        steps=Steps(
            look=Call(name="bash", arguments={"command": CAT}),
            write=Call(name="bash", arguments={"command": COPY}),
            end=Call(
                name="bash",
                arguments={"command": f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo {DONE}"},
            ),
        ),
    ),
    *(
        Client(
            name="aider",
            package="aider-chat",
            installation=INSTALLATIONS["aider"],
            api="chat",
            streamed=streamed,
            command=lambda gateway, options=options: aider(*options),
            branches=(3, 3),  # it rewrites its history, and asks for a message of a commit
            steps=Steps(
                look=f"I need to see {NOTE}.",
                write=f"{WRITTEN}\n```\nThe note {WROTE}.\n```\n{DONE}",
            ),
        )
        for streamed, options in [(False, ["--no-stream"]), (True, [])]
    ),
]
