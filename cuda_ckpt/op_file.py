"""The op file: what a worker last tried on its target, on disk for whoever comes after a crash.

``{"op_id", "op", "target": {"pid", "start_time"}, "worker": {"pid", "start_time"}, "started",
"result"}``. A worker writes it before each operation that changes the target, with ``result`` null,
and again after it. Nothing happens when this module is imported.
"""

from __future__ import annotations

import json
import os
import time
from typing import NamedTuple, TypeVar

from cuda_ckpt.errors import CudaCheckpointError

Json = dict[str, object]

_Kind = TypeVar("_Kind")


class ProcessIdentity(NamedTuple):
    """A process, by pid and start time (clock ticks since boot)."""

    pid: int
    start_time: int


class OpRecord(NamedTuple):
    """The last operation that a worker tried on its target.

    ``result`` is None while the call runs, or if the worker died in it. Otherwise it has the fields
    of the worker's reply but ``op_id``; its ``state`` is None until the driver has answered what
    state the call left, which can hang while peers of the target are locked.
    """

    op_id: str
    op: str
    target: ProcessIdentity
    worker: ProcessIdentity
    started: float  # seconds since the epoch
    result: Json | None


class OpFileError(CudaCheckpointError):
    """The op file cannot be written, or what was read is not one."""


def read_op_file(path: str) -> OpRecord | None:
    """Reads what a worker last tried; None if it never tried anything.

    Raises OpFileError for content that no worker wrote, and OSError if the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            content = _typed(json.loads(file.read()), dict)
        result = content["result"]
        return OpRecord(
            op_id=_typed(content["op_id"], str),
            op=_typed(content["op"], str),
            target=_identity(content["target"]),
            worker=_identity(content["worker"]),
            started=float(content["started"]),
            result=None if result is None else _typed(result, dict),
        )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as exc:
        raise OpFileError(
            f"{path} is not an op file: {exc!r}",
            operation="read_op_file",
            advice="Nothing is known of the last operation: ask for the state of the process.",
        ) from exc


class OpFile:
    """Writes an op file, each version whole: beside it at first, then renamed.

    It is not flushed to the device. It outlives the worker and the daemon; a power cut takes the
    target as well, and with it all that the file could tell.
    """

    def __init__(self, path: str, target: ProcessIdentity, worker: ProcessIdentity) -> None:
        self._path = path
        self._record: Json = {"target": target._asdict(), "worker": worker._asdict()}

    def begin(self, op_id: str, op: str) -> None:
        """Records that an operation is about to be tried; raises OpFileError if that fails."""
        self._record.update(op_id=op_id, op=op, started=time.time(), result=None)
        self._write()

    def end(self, reply: Json) -> None:
        """Records what became of it; raises OpFileError if that fails."""
        self._record["result"] = {key: value for key, value in reply.items() if key != "op_id"}
        self._write()

    def _write(self) -> None:
        temporary = f"{self._path}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            with open(os.open(temporary, flags, 0o600), "wb") as file:
                file.write(json.dumps(self._record).encode())
            os.replace(temporary, self._path)
        except OSError as exc:
            raise OpFileError(
                f"cannot write the op file: {exc}",
                operation=str(self._record["op"]),
                advice="Make room or correct the rights of its directory.",
            ) from exc


def _typed(value: object, kind: type[_Kind]) -> _Kind:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is not a {kind.__name__}")
    return value


def _identity(value: object) -> ProcessIdentity:
    fields = _typed(value, dict)
    return ProcessIdentity(_typed(fields["pid"], int), _typed(fields["start_time"], int))
