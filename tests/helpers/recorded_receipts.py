"""Run a recipe and write the receipts of its publications: python ... FILE RECIPE [flags]."""

import importlib.util
import json
import sys

from primerl import track


class Recorded:
    """A publication whose receipt is written to the file when it is there."""

    def __init__(self, publication):
        self.publication = publication

    def wait(self):
        receipt = self.publication.wait()
        workers = [worker for server in receipt.servers.values() for worker in server]
        line = {
            "version": receipt.version,
            "kind": receipt.kind,
            "digest": receipt.digest,
            "workers": [worker["digest"] for worker in workers],
        }
        with open(FILE, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return receipt


if __name__ == "__main__":
    FILE, path = sys.argv.pop(1), sys.argv.pop(1)
    spec = importlib.util.spec_from_file_location("recipe", path)
    recipe = importlib.util.module_from_spec(spec)
    sys.modules["recipe"] = recipe  # where tyro looks for the comments of arguments
    spec.loader.exec_module(recipe)
    opened = recipe.open_transport

    def open_transport(*arguments):
        transport = opened(*arguments)
        start = transport.start
        transport.start = lambda version: Recorded(start(version))
        return transport

    recipe.open_transport = open_transport
    recipe.main(track.command_line(recipe.Args, presets={"scale": recipe.SCALES}))
