"""``check_engine``, which checks an engine against the contract of engines."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any

from primerl.testing.engine_checks import CHECKS, FIRST, EngineCase, Skipped

STOP_S = 10.0


def check_engine(
    engine: Any,
    *,
    prompt_ids: Sequence[int] = (3, 4, 5),
    max_tokens: int = 16,
    concurrency: int = 16,
    update: Callable[[int], Any] | None = None,
    timeout_s: float = 60.0,
) -> dict[str, str]:
    """Check a running engine against the contract of ``rollout.Engine``; return the outcomes.

        with MyEngine(model) as engine:
            testing.check_engine(engine, update=weights.SharedMemory(model, engine).publish)

    The checks (``engine_checks.CHECKS``) run one after another, on an event loop in another thread.
    If the engine does not implement the protocol, or a check times out, the remaining checks are
    not run.

    Args:
        engine: the engine, already started.
        prompt_ids: a prompt in the engine's vocabulary.
        max_tokens: ``max_tokens`` of most requests.
        concurrency: the number of concurrent requests.
        update: ``version -> None`` publishes any weights as that version, from any thread, and
            returns when they are served. None: weight updates are not checked.
        timeout_s: time limit of each check.

    Returns:
        ``"passed"`` or ``"skipped: <reason>"``, by the name of the check.

    Raises:
        AssertionError: checks failed; the message lists each, and what was expected.
    """
    case = EngineCase(
        engine=engine,
        prompt_ids=list(prompt_ids),
        max_tokens=max_tokens,
        concurrency=concurrency,
        update=update,
    )
    outcomes: dict[str, str] = {}
    with _LoopThread() as loop:
        for check in CHECKS:
            outcomes[check.__name__] = outcome = loop.outcome(check(case), timeout_s)
            fatal = check in FIRST and outcome.startswith("failed")
            if fatal or outcome.startswith("failed: no end"):
                break
    failures = {name: outcome for name, outcome in outcomes.items() if outcome.startswith("failed")}
    if failures:
        lines = [f"- {name} {outcome}" for name, outcome in failures.items()]
        lines += [f"- {check.__name__} was not run" for check in CHECKS[len(outcomes) :]]
        title = f"{type(engine).__name__} fails {len(failures)} of {len(outcomes)} checks:"
        raise AssertionError("\n".join([title, *lines]))
    return outcomes


class _LoopThread:
    """An event loop in a thread, so that a check that blocks the loop can be abandoned."""

    def __enter__(self) -> "_LoopThread":
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="check-engine", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)

    def outcome(self, check: Coroutine[Any, Any, None], timeout_s: float) -> str:
        future: Future[None] = asyncio.run_coroutine_threadsafe(check, self._loop)
        try:
            future.result(timeout_s)
        except Skipped as reason:
            return f"skipped: {reason}"
        except AssertionError as failure:
            return f"failed: {failure}"
        except TimeoutError as error:
            if future.done():  # the engine raised it, not the check's time limit
                return f"failed: TimeoutError: {error}"
            future.cancel()
            return f"failed: no end within {timeout_s:g} s"
        except Exception as error:  # every kind: an error of the engine is an outcome
            return f"failed: {type(error).__name__}: {error}"
        return "passed"

    def _run(self) -> None:
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        if left:
            self._loop.run_until_complete(asyncio.wait(left, timeout=1.0))
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
