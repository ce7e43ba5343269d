"""Passes the signals of tslicectl on to the command that it runs.

While the command waits in the queue there is nobody to pass them to: then a signal ends the wait.
"""

from __future__ import annotations

import os
import signal
import subprocess
from types import FrameType

#: Signals that ask a process to end or that mean something to it alone. Not those of job control:
#: a stop from the terminal reaches the command as well, without our help.
PASSED_ON = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_FROM_KEYBOARD = (signal.SIGINT, signal.SIGQUIT)


class Interrupted(BaseException):
    """A signal came while there was no command to pass it to.

    Like KeyboardInterrupt no Exception, so that no handler of errors takes it for one.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class SignalRelay:
    """Takes signals in for a command: a context manager for the main thread.

    Until `start` each signal raises Interrupted. What comes between `start` and `attach` is kept
    for the command; after it, everything is passed on.
    """

    def __init__(self) -> None:
        self._before: dict[signal.Signals, object] = {}
        self._starting = False
        self._kept: list[int] = []
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> SignalRelay:
        for signum in PASSED_ON:
            # What our caller has told us to ignore (nohup) is ignored by the command too.
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._before[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]  # what signal() returned

    def start(self) -> None:
        """From now on signals wait for the command instead of raising."""
        self._starting = True

    def attach(self, child: subprocess.Popen[bytes]) -> None:
        """From now on signals go to ``child``, first those that came since `start`."""
        self._child = child
        kept, self._kept = self._kept, []
        for signum in kept:
            child.send_signal(signum)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._child is not None:
            if not (signum in _FROM_KEYBOARD and in_foreground()):
                self._child.send_signal(signum)
        elif self._starting:
            self._kept.append(signum)
        else:
            raise Interrupted(signum)


def in_foreground() -> bool:
    """Tells whether the terminal sends its keyboard's signals to our process group.

    Then the command has got them from the terminal, and a second Ctrl-C would mean more than one.
    """
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:  # no terminal controls us
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
