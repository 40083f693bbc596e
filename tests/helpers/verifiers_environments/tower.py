"""An environment with one required option, whose name is not one of the usual ones."""

from typing import Literal

import verifiers.v1 as vf

__all__ = ["Tower"]


class Options(vf.TasksetConfig):
    floor: Literal[1, 2, 3]
    height: int = 3


class Tower(vf.Taskset[vf.Task, Options]):
    def load(self):
        yield vf.Task(vf.TaskData(prompt=f"Floor {self.config.floor}"), self.config.task)
