"""``cuda-ckpt``: a drop-in for NVIDIA's cuda-checkpoint utility: same flags, words and exit status.

The exit status is the driver's error code, of which the kernel keeps the low eight bits (401 shows
as 145 in a shell); stderr has all of it. Usage errors exit with 1, which is the driver's code for
an invalid value. Where the utility is careless this program refuses or sets a limit instead:

* A lock always has one, also within ``--toggle``: ``DEFAULT_LOCK_LIMIT_MS``. The utility waits for
  ever behind a kernel that never ends.
* ``--toggle`` with ``--timeout`` or ``--device-map`` is refused; the utility ignores them.
* A toggle whose checkpoint failed unlocks the process again, if it is still locked.
* Signals wait until the driver has answered: a caller killed in a call leaves its target hanging.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from cuda_ckpt import _system
from cuda_ckpt.errors import CudaCheckpointError, IllegalStateError, error_for
from cuda_ckpt.process import MAX_TIMEOUT_MS, Driver, Process, ProcessState

# Long enough for any step that ends. One minute has proved too short in production elsewhere.
DEFAULT_LOCK_LIMIT_MS = 180_000

USAGE_ERROR = 1
_ACTIONS = ("lock", "checkpoint", "restore", "unlock")
_CODE_ILLEGAL_STATE = 401


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"{self.prog}: {message}\nTry '{self.prog} --help'.\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Carries out one command line and returns the exit status."""
    options = _parse(arguments)
    _system.block_signals()
    for variable in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        os.environ.pop(variable, None)  # they hide devices, and a device map needs all
    try:
        _run(options, Process(options.pid, Driver()))
    except CudaCheckpointError as exc:
        print(f"cuda-ckpt: {exc}", file=sys.stderr)
        return exit_status(exc.code)
    return 0


def exit_status(code: int | None) -> int:
    """Returns the exit status for an error code; never one that the kernel would cut to zero."""
    if code is None:
        return USAGE_ERROR
    return code if code % 256 else 255


def toggle(process: Process) -> None:
    """Suspends a running process, or resumes a checkpointed one.

    If the checkpoint fails, the process is unlocked again where its state allows that.
    """
    state = process.state
    if state is ProcessState.RUNNING:
        process.lock(DEFAULT_LOCK_LIMIT_MS)
        try:
            process.checkpoint()
        except CudaCheckpointError as exc:
            exc.advice = f"{_roll_back(process)} {exc.advice}"
            raise
    elif state is ProcessState.CHECKPOINTED:
        process.restore()
        process.unlock()
    else:
        error = error_for(
            _CODE_ILLEGAL_STATE,
            operation="toggle",
            pid=process.pid,
            driver_version=process.driver.version,
        )
        error.advice = f"It is {state.value}; toggle needs running or checkpointed."
        raise error


def _roll_back(process: Process) -> str:
    """Unlocks a process whose checkpoint failed; says in a sentence how that went."""
    try:
        process.unlock()
    except IllegalStateError:
        with contextlib.suppress(CudaCheckpointError):
            return f"The process is {process.state.value} now."
        return "The state of the process is unknown."
    except CudaCheckpointError as exc:
        return f"It could not be unlocked again ({exc.message})."
    return "It was unlocked again and runs on."


def _run(options: argparse.Namespace, process: Process) -> None:
    if options.get_state:
        print(process.state.value)
    elif options.get_restore_tid:
        print(process.restore_thread_id)
    elif options.toggle:
        toggle(process)
    elif options.action == "lock":
        process.lock(options.timeout or DEFAULT_LOCK_LIMIT_MS)
    elif options.action == "checkpoint":
        process.checkpoint()
    elif options.action == "restore":
        process.restore(options.device_map)
    else:
        process.unlock()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _make_parser()
    options = parser.parse_args(arguments)
    if len(options.pids or ()) != 1:
        parser.error("give exactly one --pid")
    options.pid = options.pids[0]
    if options.timeout is not None and options.action != "lock":
        parser.error("--timeout goes with --action lock only")
    if options.device_map is not None and options.action != "restore":
        parser.error("--device-map goes with --action restore only")
    return options


def _make_parser() -> _Parser:
    parser = _Parser(
        prog="cuda-ckpt",
        description="Checkpoint and restore the CUDA state of a process.",
        epilog="The exit status is 0, or the error code of the CUDA driver (its low eight bits).",
        allow_abbrev=False,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--get-state",
        action="store_true",
        help="print running, locked, checkpointed, failed or transitional",
    )
    what.add_argument(
        "--get-restore-tid",
        action="store_true",
        help="print the id of the driver's thread in the process",
    )
    what.add_argument(
        "--toggle",
        action="store_true",
        help="lock and checkpoint a running process, or restore and unlock a checkpointed one; the "
        f"lock may take {DEFAULT_LOCK_LIMIT_MS // 1000} s",
    )
    what.add_argument("--action", choices=_ACTIONS, help="carry out a single step")
    parser.add_argument(
        "--pid", dest="pids", metavar="PID", action="append", type=_pid, help="the process"
    )
    parser.add_argument(
        "--timeout",
        type=_timeout,
        metavar="MS",
        help=f"limit of --action lock in milliseconds (default {DEFAULT_LOCK_LIMIT_MS}); a process "
        "whose work has not ended by then runs on",
    )
    parser.add_argument(
        "--device-map",
        type=_device_map,
        metavar="OLD=NEW,...",
        help="for --action restore: UUIDs of all devices of the process, and of those to use",
    )
    return parser


def _pid(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"not a process id: {text!r}")
    return int(text)


def _timeout(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 0 < int(text) <= MAX_TIMEOUT_MS:
        raise argparse.ArgumentTypeError(
            f"not a number of milliseconds in 1..{MAX_TIMEOUT_MS}: {text!r} (without a limit, a "
            "lock can wait for ever)"
        )
    return int(text)


def _device_map(text: str) -> dict[str, str]:
    pairs = [pair.split("=") for pair in text.split(",")]
    if any(len(pair) != 2 or not all(pair) for pair in pairs):
        raise argparse.ArgumentTypeError(f"not OLD=NEW,OLD=NEW,...: {text!r}")
    device_map = dict(pairs)
    if len(device_map) != len(pairs):
        raise argparse.ArgumentTypeError(f"a device is named twice: {text!r}")
    return device_map


if __name__ == "__main__":
    sys.exit(main())
