"""A pool in the event loop of a rollout worker leaves it free for others."""

import asyncio
import time

from sandboxed import needed, with_pool

needed()


def test_fifty_runs_at_once_leave_the_loop_free():
    """The loop's own share of the work is small: processor time of this thread, not of a clock."""

    async def run(pool):
        before = time.thread_time()
        results = await asyncio.gather(*(pool.run("print(1)") for _ in range(50)))
        assert all(result.ok for result in results)
        return (time.thread_time() - before) / 50

    assert with_pool(run, concurrency=50, warm=10) < 0.02
