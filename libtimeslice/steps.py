"""Steps between which a job of several ranks can be paused: all of them behind the same step.

Ranks that wait for one another in collectives can be frozen only while none of them waits: the one
that is frozen first would keep the others in their collectives for ever. By chance that happens
rarely, and never where the host runs ahead of its devices. So the ranks have to agree.

When the daemon asks for a pause, each rank counts the steps that it has begun, and begins no more.
`agree` makes one number of all the ranks' counts, the largest, and each rank goes on until it has
begun so many. Then no rank has queued anything that another will not queue too, so the device work
of all comes to its end, and the daemon is answered.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from libtimeslice import accelerator
from libtimeslice.callbacks import Pause, Resume

#: Makes one number of those of all ranks, the largest: (this rank's, the pause, a monotonic
#: instant by which it must be known) -> that of all. It runs in the agent's thread.
Agree = Callable[[int, Pause, float], int]

#: Of the pause's time, what the ranks may take: the daemon's own limit should not come first,
#: since it cannot say what it was that took so long.
_SHARE = 0.9
_POLL_S = 0.005


class PausableStep:
    """A `with` block around each step of the main loop. Made by `TimeSlice.pausable_step`.

    Entering waits while the ranks are paused. Every rank must enter it equally often, and queue
    device work that needs others inside it alone; it takes leases outside of it, since a rank that
    waits for its turn inside would not come to the step's end. One thread enters it; it does not
    nest.
    """

    def __init__(self, *, agree: Agree | None, finish: Callable[[], object] | None) -> None:
        self._agree = agree if agree is not None else TorchAgreement()
        self._finish = finish if finish is not None else accelerator.synchronize
        self._changed = threading.Condition()
        self._begun = 0
        self._inside = False
        #: How many may be begun; None: nobody wants a pause.
        self._allowed: int | None = None

    def __enter__(self) -> PausableStep:
        with self._changed:
            while self._allowed is not None and self._begun >= self._allowed:
                self._changed.wait()
            self._begun += 1
            self._inside = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            self._inside = False
            self._changed.notify_all()

    def pause(self, pause: Pause) -> None:
        """Stops this rank behind the step that all agree on, with its device work done.

        Raises TimeoutError if that takes too long, and whatever `agree` and `finish` raise.
        """
        deadline = time.monotonic() + _SHARE * pause.timeout_s
        with self._changed:
            # Nothing is begun from here on, so what is proposed stays true until all know it.
            proposed = self._allowed = self._begun
        allowed = self._agree(proposed, pause, deadline)
        with self._changed:
            self._allowed = allowed
            self._changed.notify_all()
            left_s = deadline - time.monotonic()
            if not self._changed.wait_for(lambda: self._is_behind(allowed), max(0.0, left_s)):
                raise TimeoutError(
                    f"all ranks pause behind step {allowed}, and this one has begun "
                    f"{self._begun} and is {'in it' if self._inside else 'between two'}"
                )
        self._finish()

    def _is_behind(self, step: int) -> bool:
        return self._begun >= step and not self._inside

    def resume(self, _resume: Resume) -> None:
        """Lets the steps go on."""
        with self._changed:
            self._allowed = None
            self._changed.notify_all()


class TorchAgreement:
    """Agrees through the store that torch.distributed was initialized with, if it was.

    The store is asked and not waited on: other threads of torch use it at the same time, and one
    that waits keeps all others out.
    """

    def __init__(self) -> None:
        self._written: str | None = None

    def __call__(self, number: int, pause: Pause, deadline: float) -> int:
        """Returns the largest number of all ranks; without torch.distributed, this rank's own."""
        distributed = _initialized()
        if distributed is None or distributed.get_world_size() == 1:
            return number
        if pause.move is None:
            raise RuntimeError("ranks can agree on a step with a daemon of protocol 1.1 or later")
        store = distributed.distributed_c10d._get_default_store()
        names = [f"timeslice/{pause.move}/{rank}" for rank in range(distributed.get_world_size())]
        if self._written is not None:
            store.delete_key(self._written)
        self._written = names[distributed.get_rank()]
        store.set(self._written, str(number))
        while not store.check(names):
            if time.monotonic() >= deadline:
                missing = [str(rank) for rank, name in enumerate(names) if not store.check([name])]
                raise TimeoutError(f"rank {', '.join(missing)} did not say which step it is in")
            time.sleep(_POLL_S)
        return max(int(store.get(name)) for name in names)


def _initialized() -> Any:  # Any: torch's types are not a dependency
    """torch.distributed, if somebody imported and initialized it in this process."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is None or not distributed.is_available():
        return None
    return distributed if distributed.is_initialized() else None
