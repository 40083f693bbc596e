"""A recipe with a task that a random model learns in a few steps: to reply with the letter a.

python edited_recipe.py RECIPE [its arguments]
"""

import importlib.util
import sys

from primerl import track


def tasks(seed):
    return [{"prompt": word} for word in ("b", "c", "d", "e", "f", "g", "h", "i")]


def reward(task, reply):
    return reply.count("a") / 8


if __name__ == "__main__":
    spec = importlib.util.spec_from_file_location("recipe", sys.argv.pop(1))
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    recipe.build_tasks, recipe.reward = tasks, reward
    recipe.main(track.command_line(recipe.Args))
