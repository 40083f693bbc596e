import asyncio

import verifiers.v1 as vf


class Guesses(vf.State):
    secret: int = 0
    count: int = 0
    found: bool = False


class GuessTools(vf.Toolset[vf.SharedToolsetConfig, Guesses]):
    TOOL_PREFIX = None

    @vf.tool
    async def guess(self, n: int) -> str:
        """Guess the number."""
        self.state.count += 1
        self.state.found = n == self.state.secret
        return "right" if self.state.found else "higher" if n < self.state.secret else "lower"

    @vf.tool
    async def sleep(self) -> str:
        """Never answers."""
        await asyncio.sleep(600)
        return "awake"

    @vf.tool
    async def fail(self) -> str:
        """Raises."""
        raise ZeroDivisionError("no such luck")


if __name__ == "__main__":
    GuessTools.run()
