"""Parsers for the command lines in the cluster files, as the started programs read them."""

import functools
import json
import signal
import sys

import attrs
import pytest
from glm_swe_trainer import load
from torch.distributed.run import get_args_parser

from primerl import serving, track
from primerl.serving.server import __main__ as server_module
from primerl.serving.server.arguments import server_command


class StartedError(Exception):
    """Raised instead of starting a server."""


def launched(words):
    """Return the arguments that torchrun reads from its command line."""
    parser = get_args_parser()
    if "--shutdown-timeout" not in parser.format_help():
        pytest.skip("this torchrun has no --shutdown-timeout, which the files for clusters pass")
    return parser.parse_args(words)


def recipe_arguments(recipe, launch, monkeypatch):
    """Return the recipe's arguments, parsed from the words that torchrun passes on."""
    monkeypatch.setattr(sys, "argv", [launch.training_script, *launch.training_script_args])
    return track.command_line(recipe.Args, presets={"scale": recipe.SCALES})


def served(words, monkeypatch):
    """Return the model and vLLM's arguments by name, for ``python`` with these words."""
    assert words[:2] == ["-m", server_module.__spec__.parent]
    found = []

    def start(model, engine_args, *, flags, host, port, weight_transfer, **_):
        place = {"host": host, "port": port, "weight_transfer": weight_transfer}
        command = server_command(model, engine_args=engine_args, flags_as_given=flags, **place)
        found.extend([model, by_name(command)])
        raise StartedError

    monkeypatch.setenv("PRIMERL_API_KEY", "key")
    monkeypatch.setattr(server_module, "VLLMServer", start)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(StartedError):
            server_module.main(words[2:])
    finally:
        signal.signal(signal.SIGTERM, handler)
    return found


def served_by_recipe(recipe, tiny_model, model, monkeypatch):
    """Return vLLM's arguments by name, for the server that the recipe itself would start."""
    found = []
    args = attrs.evolve(recipe.SCALES["glm5"], server_model=model)

    def start(_, env, api_key, **settings):
        assert len(api_key) > 30
        gpus = range(8, 8 + args.server_gpus[0])  # after the trainer's
        assert env == {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
        place = {"host": "0.0.0.0", "port": 8000, "weight_transfer": "primerl"}
        found.append(by_name(server_command(model, engine_args=settings, **place)))
        raise StartedError

    monkeypatch.setattr(serving, "serve_vllm", start)
    with pytest.raises(StartedError), recipe.open_engine(args, str(tiny_model)):
        pass
    return found[0]


@functools.cache
def planned(root, scale="glm5"):
    """Return the plan of a scale with its first layout and server."""
    recipe = load(root / "recipes/glm_swe.py")
    args = recipe.SCALES[scale]
    first = attrs.evolve(args, nodes=args.nodes[:1], server_gpus=args.server_gpus[:1])
    return recipe.plan(first)


def over_nodes(*, first, start_rank=None):
    """Return the flags of a node of a server over several nodes of 8 GPUs."""
    joins = {"--headless": "", "--data-parallel-start-rank": str(start_rank)}
    address = {"--data-parallel-size-local": "8", "--data-parallel-address": first}
    return address | ({} if start_rank is None else joins)


def sharing(folder, *, role):
    """Return the flag of a server that shares keys and values by a folder."""
    return {"--kv-transfer-config": json.dumps(serving.kv_folder(folder, role=role))}


def planned_storage(root):
    """Return the storage plan of the scale glm5, whose sizes are in the cluster files."""
    return planned(root).storage


def by_name(command):
    """Parse vLLM's command into a dict; ``--a b`` and ``--a=b`` are the same."""
    found = {}
    for word, following in zip(command, [*command[1:], "--"], strict=True):
        if word.startswith("--"):
            name, given, value = word.partition("=")
            if name == "--middleware":  # may be given several times
                name, value = word, ""
            assert name not in found, f"{name} is given twice"
            found[name] = value if given else "" if following.startswith("--") else following
    return found
