"""An environment whose option ``game``, which is required, chooses among two games."""

from typing import Literal

import verifiers.v1 as vf

__all__ = ["Arcade"]

PROMPTS = {"echo": "Say it back: {word}", "reverse": "Reverse it: {word}"}


class Round(vf.TaskData):
    answer: str


class Play(vf.Task[Round]):
    @vf.reward
    async def won(self, trace):
        return float(trace.last_reply == self.data.answer)


class Options(vf.TasksetConfig):
    game: Literal["echo", "reverse"]
    word: str = "abc"


class Arcade(vf.Taskset[Play, Options]):
    def load(self):
        game, word = self.config.game, self.config.word
        answer = word if game == "echo" else word[::-1]
        yield Play(Round(prompt=PROMPTS[game].format(word=word), answer=answer), self.config.task)
