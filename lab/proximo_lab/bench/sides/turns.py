"""Run a foreign loop one round at a time."""

from collections.abc import Callable
from threading import Semaphore, Thread

import torch

LONGEST = 3600.0
"""Maximum seconds of a round; a benchmark's rounds are a thousand times shorter."""


class Stopped(BaseException):
    """Ends a loop from within; not an Exception, so that no handler on the way catches it."""


class Rounds:
    """Runs `loop` on its own thread, which stops whenever it calls `pause`, until the next `resume`.

    Example: rounds = Rounds(trainer.train); trainer.add_callback(...rounds.pause...); rounds.resume()
    """

    def __init__(self, loop: Callable[[], object]) -> None:
        self._loop = loop
        self._go, self._done = Semaphore(0), Semaphore(0)
        self._threads = torch.get_num_threads()
        self._failure: BaseException | None = None
        self._stops, self._ended = False, False
        self._thread = Thread(target=self._work, name="rounds", daemon=True)

    def resume(self) -> None:
        """Run to the next pause; exceptions of the loop are raised here."""
        if self._thread.ident is None:
            self._thread.start()
        self._go.release()
        if not self._done.acquire(timeout=LONGEST):
            raise TimeoutError(f"a round of the other loop has not ended in {LONGEST:.0f} s")
        if self._failure is not None:
            # Without its traceback, whose frames would hold the memory that may just have run out.
            raise self._failure.with_traceback(None)
        assert not self._ended, "the loop ended by itself"

    def pause(self) -> None:
        """Called by the loop, at the end of each round."""
        self._done.release()
        self._go.acquire()
        if self._stops:
            raise Stopped

    def stop(self) -> None:
        """End the loop at its current pause."""
        if self._thread.is_alive():
            self._stops = True
            self._go.release()
            self._thread.join(LONGEST)

    def _work(self) -> None:
        self._go.acquire()
        torch.set_num_threads(self._threads)  # every thread has a number of its own
        try:
            self._loop()
        except Stopped:
            pass
        except BaseException as failure:
            self._failure = failure
        finally:
            self._ended = True
            del self._loop
            self._done.release()
