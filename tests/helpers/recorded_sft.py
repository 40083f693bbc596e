"""The SFT recipe with recording of its batches and an optional kill.

Run ``python recorded_sft.py RECIPE RECORD KILL_AT [its arguments]``. RECORD gets one line per step,
with the token ids of the samples. The process is killed with SIGKILL before the step that draws its
batch number KILL_AT.
"""

import importlib.util
import json
import os
import signal
import sys

from primerl import track

path, record, kill_at = sys.argv.pop(1), sys.argv.pop(1), int(sys.argv.pop(1))
spec = importlib.util.spec_from_file_location("recipe", path)
recipe = importlib.util.module_from_spec(spec)
spec.loader.exec_module(recipe)
draw_samples = recipe.draw_samples
drawn = 0


def recorded(stream, *arguments):
    global drawn
    samples = draw_samples(stream, *arguments)
    if stream is not None:
        with open(record, "a", encoding="utf-8") as file:
            file.write(json.dumps([sample.token_ids.tolist() for sample in samples]) + "\n")
        drawn += 1
        if drawn == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
    return samples


recipe.draw_samples = recorded
recipe.main(track.command_line(recipe.Args))
