"""Reverse an English word of 3 to 5 letters."""

import random
from importlib import resources
from typing import Literal

import verifiers.v1 as vf

__all__ = ["ReverseWords"]


class Word(vf.TaskData):
    """A word to be reversed."""

    answer: str


class ReverseWord(vf.Task[Word]):
    """Rewarded for correct letters and for the correct word."""

    @vf.reward
    async def reversal(self, trace: vf.Trace) -> float:
        """Half for the share of letters in the right place, half for the whole word."""
        reply, answer = trace.last_reply, self.data.answer
        right = sum(a == b for a, b in zip(reply, answer, strict=False))
        return 0.5 * right / max(len(answer), len(reply)) + 0.5 * (reply == answer)

    @vf.metric
    async def exact_match(self, trace: vf.Trace) -> float:
        """Whether the reply is the reversed word."""
        return float(trace.last_reply == self.data.answer)


class Options(vf.TasksetConfig):
    """The prompt, and which words are used."""

    prompt: str = "Reverse the letters of this word, and reply with nothing else: {word}"
    split: Literal["train", "eval"] = "train"
    held_out: int = 256
    seed: int = 0


class ReverseWords(vf.Taskset[ReverseWord, Options]):
    """Every word once, in an order given by ``seed``; the first ``held_out`` are for eval."""

    def load(self) -> list[ReverseWord]:
        """All words of the split."""
        text = resources.files(__name__).joinpath("words.txt").read_text(encoding="utf-8")
        words = text.split()
        random.Random(self.config.seed).shuffle(words)
        held_out = self.config.held_out
        chosen = words[:held_out] if self.config.split == "eval" else words[held_out:]
        return [self._task(word) for word in chosen]

    def _task(self, word: str) -> ReverseWord:
        prompt = self.config.prompt.format(word=word)
        return ReverseWord(Word(id=word, prompt=prompt, answer=word[::-1]), self.config.task)
