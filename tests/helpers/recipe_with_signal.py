"""Run RECIPE [flags] with a reward that any policy sometimes gets."""

import importlib.util
import sys
import zlib

from primerl import track

path = sys.argv.pop(1)
spec = importlib.util.spec_from_file_location("recipe", path)
recipe = importlib.util.module_from_spec(spec)
sys.modules["recipe"] = recipe
spec.loader.exec_module(recipe)
recipe.reward = lambda task, reply: float(zlib.crc32(reply.encode()) % 2)

if __name__ == "__main__":
    recipe.main(track.command_line(recipe.Args))
