"""The scripted policy: it looks into a file, writes what it saw in capitals, and says so."""

import attrs
from families import Call, Family

NOTE = "note.txt"
WRITTEN = "answer.txt"
CODE = "lantern"
LOOKED = f"says {CODE}"  # a result has this text once the policy has looked
WROTE = f"says {CODE.upper()}"
DONE = "The code is written down."
TITLE = "A short note"
TASK = "Find the code in note.txt and write it down."


@attrs.frozen(kw_only=True)
class Steps:
    """What the policy does to look, to write and to end: calls of tools, or texts."""

    look: Call | str
    write: Call | str
    end: Call | str = DONE


@attrs.frozen(kw_only=True)
class Policy:
    """A policy of a family: it reasons or not, and looks twice at once or once."""

    family: Family
    reasons: bool
    twice: bool = False

    @property
    def id(self):
        """The name of its tests."""
        kind = "reasoning" if self.reasons else "plain"
        return f"{self.family.name}-{kind}{'-twice' if self.twice else ''}"

    def script(self, steps):
        """Return its replies to an agent with these steps: a function of prompt and number."""

        def reply(prompt, number):
            offered = isinstance(steps.look, str) or f'"name": "{steps.look.name}"' in prompt
            if not offered:  # agents also ask for titles and summaries, without tools
                return self._say("What is it about?", TITLE)
            if LOOKED not in prompt:
                return self._take("I should look first.", "Let me look.", steps.look)
            if WROTE not in prompt:
                return self._take("Now I know the code.", "", steps.write)
            return self._take("Both are done.", "", steps.end)

        return reply

    def _take(self, reasoning, text, step):
        if isinstance(step, str):
            return self._say(reasoning, step)
        return self._say(reasoning, text, *[step] * (2 if self.twice and text else 1))

    def _say(self, reasoning, text, *calls):
        return self.family.write(reasoning if self.reasons else "", text, calls)
