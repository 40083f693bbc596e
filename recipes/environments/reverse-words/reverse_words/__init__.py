"""A verifiers environment whose tasks are to reverse English words of 3 to 5 letters."""

import random
from importlib import resources
from typing import Literal

import verifiers.v1 as vf

__all__ = ["ReverseWords"]


class Word(vf.TaskData):
    """Data of a task: the word to reverse is its id, and ``answer`` is the reversed word."""

    answer: str


class ReverseWord(vf.Task[Word]):
    """Task: reverse a word. Correct letters and the correct word are rewarded."""

    @vf.reward
    async def reversal(self, trace: vf.Trace) -> float:
        """Return the mean of the fraction of letters in the right place and the exact match."""
        reply, answer = trace.last_reply, self.data.answer
        right = sum(a == b for a, b in zip(reply, answer, strict=False))
        return 0.5 * right / max(len(answer), len(reply)) + 0.5 * (reply == answer)

    @vf.metric
    async def exact_match(self, trace: vf.Trace) -> float:
        """Return 1 if the reply is the reversed word, else 0."""
        return float(trace.last_reply == self.data.answer)


class Options(vf.TasksetConfig):
    """Options: the prompt, and the selection of words."""

    prompt: str = "Reverse the letters of this word, and reply with nothing else: {word}"
    split: Literal["train", "eval"] = "train"
    held_out: int = 256
    seed: int = 0


class ReverseWords(vf.Taskset[ReverseWord, Options]):
    """Taskset with each word once, in an order given by ``seed``; the first are for eval."""

    def load(self) -> list[ReverseWord]:
        """Return the tasks of the split."""
        text = resources.files(__name__).joinpath("words.txt").read_text(encoding="utf-8")
        words = text.split()
        random.Random(self.config.seed).shuffle(words)
        held_out = self.config.held_out
        chosen = words[:held_out] if self.config.split == "eval" else words[held_out:]
        return [self._task(word) for word in chosen]

    def _task(self, word: str) -> ReverseWord:
        prompt = self.config.prompt.format(word=word)
        return ReverseWord(Word(id=word, prompt=prompt, answer=word[::-1]), self.config.task)
