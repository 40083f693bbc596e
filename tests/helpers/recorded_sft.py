"""The recipe for supervised fine-tuning, which records its batches and may be killed.

python recorded_sft.py RECIPE RECORD KILL_AT [its arguments]: a line of RECORD for each step, the
token ids of its samples; SIGKILL before the step that draws batch KILL_AT of this process.
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
