"""The CUDA driver's checkpoint API, through one worker process per rank.

The daemon's own process never loads libcuda: a call into the driver may hang, and a caller that is
killed in the middle of one leaves its target hanging for ever. So each rank has a worker
(`cuda_ckpt.worker`) that attached to the driver once, finishes its call even when the daemon is
gone, and leaves the result in its op file. A worker that an earlier run of the daemon left behind
is waited for before anybody else touches its rank.

Here, and in `cuda_ckpt`, the words are NVIDIA's: lock, checkpoint, restore, unlock.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any, Final

from cuda_ckpt.worker import OpFileError, OpRecord, read_op_file, worker_command
from tsliced.core.model import Cause, ProcessId, RankId, RankState
from tsliced.host.backends.base import Backend, BackendContext, BackendError, Outcome, failed
from tsliced.host.backends.driver_threads import hindrance_of, seems_cuda, why_not_runnable
from tsliced.host.processes import identify

#: A worker's first line comes when the driver is attached, which took up to 7 s on real hosts.
START_LIMIT_S: Final = 60.0
#: A query waits while a peer of the process is locked.
PROBE_LIMIT_S: Final = 20.0
MAX_LINE_BYTES: Final = 64 * 1024
#: Some drivers never tell a caller that its target died. There is nothing left then that could get
#: out of step, so this is the one case in which a worker is ended in the middle of a call.
DEAD_TARGET_LIMIT_S: Final = 5.0

_STATES: Final = {
    "running": RankState.RUNNING,
    "locked": RankState.FROZEN,
    "checkpointed": RankState.PARKED,
    "failed": RankState.FAILED,
}

#: By the name of the exception in the worker; all others are the driver's trouble.
_CAUSES: Final = {
    "LockTimeoutError": Cause.FREEZE_TIMEOUT,
    "UnsupportedError": Cause.UNSUPPORTED,
    "PermissionDeniedError": Cause.NOT_PERMITTED,
    "TargetFailedError": Cause.FAILED,
    "NotCudaError": Cause.UNSUPPORTED,
}


class WorkerGone(Exception):  # noqa: N818 - it ended, which may be nobody's error
    """A worker ended, or never started; the text says why."""

    #: It had been ready, and ended before it began what it was asked: another one may be asked.
    is_harmless = False


class CudaBackend(Backend):
    """Driver 570 or later (see `cuda_ckpt`)."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._workers: dict[ProcessId, Worker] = {}
        #: Of dead ranks, and given a moment to end by themselves.
        self._leaving: dict[ProcessId, Worker] = {}
        self._op_ids = 0

    async def start(self) -> None:
        """Forget what workers of earlier daemons wrote about processes that are gone."""
        await asyncio.to_thread(_sweep, self.context.directory)

    async def close(self) -> None:
        """Let the workers go: each ends after the call that it is in."""
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
        for worker in self._leaving.values():
            worker.end()
        self._leaving.clear()

    def prepare(self, process: ProcessId) -> None:
        """Start a rank's worker early: attaching to the driver takes seconds on a real host."""
        self._worker(process)

    def forget(self, process: ProcessId) -> None:
        """Let a dead rank's worker go."""
        worker = self._workers.pop(process, None)
        if worker is not None:
            worker.close()
            self._leaving[process] = worker
            loop = asyncio.get_running_loop()
            loop.call_later(DEAD_TARGET_LIMIT_S, self._end_leaving, process)

    def _end_leaving(self, process: ProcessId) -> None:
        worker = self._leaving.pop(process, None)
        if worker is not None:
            worker.end()

    async def probe(self, process: ProcessId) -> bool:
        """Ask the driver for a restore thread, in a process that seems to have one."""
        # A process may have hundreds of threads to look at.
        if not await asyncio.to_thread(seems_cuda, process.pid):
            return False
        if (stopped := why_not_runnable(process)) is not None:
            raise BackendError(stopped)
        asking = asyncio.create_task(self._ask(process, "restore_thread"), name="probe")
        # A question that is given up is not cut off: the next one must not get its answer.
        asking.add_done_callback(lambda task: task.cancelled() or task.exception())
        if asking not in (await asyncio.wait({asking}, timeout=PROBE_LIMIT_S))[0]:
            raise BackendError(f"the driver did not answer within {PROBE_LIMIT_S:g} s")
        try:
            return bool(asking.result()["ok"])
        except WorkerGone as exc:
            raise BackendError(str(exc)) from exc

    def hindrance(self, process: ProcessId) -> str | None:
        """Look whether the driver's thread in the process can run."""
        return hindrance_of(process)

    async def freeze(self, rank: RankId, *, timeout_s: float) -> Outcome:
        """Lock. A process that cannot run is refused at once: its driver would not answer."""
        stopped = why_not_runnable(rank.process)
        if stopped is not None:
            return failed(rank, Cause.STOPPED, stopped, RankState.RUNNING)
        return await self._run(rank, "lock", timeout_ms=max(1, round(timeout_s * 1000)))

    async def snapshot(self, rank: RankId) -> Outcome:
        """Checkpoint."""
        stopped = why_not_runnable(rank.process)
        if stopped is not None:
            return failed(rank, Cause.STOPPED, stopped, RankState.FROZEN)
        return await self._run(rank, "checkpoint")

    async def restore(self, rank: RankId) -> Outcome:
        """Restore."""
        stopped = why_not_runnable(rank.process)
        if stopped is not None:
            return failed(rank, Cause.STOPPED, stopped, RankState.PARKED)
        return await self._run(rank, "restore")

    async def thaw(self, rank: RankId) -> Outcome:
        """Unlock."""
        stopped = why_not_runnable(rank.process)
        if stopped is not None:
            return failed(rank, Cause.STOPPED, stopped, RankState.FROZEN)
        return await self._run(rank, "unlock")

    async def state(self, rank: RankId) -> Outcome:
        """Ask for the state."""
        stopped = why_not_runnable(rank.process)
        if stopped is not None:
            return failed(rank, Cause.STOPPED, stopped, RankState.UNKNOWN)
        return await self._run(rank, "state")

    async def _run(self, rank: RankId, op: str, **arguments: object) -> Outcome:
        try:
            reply = await self._ask(rank.process, op, **arguments)
        except WorkerGone as exc:
            return failed(rank, Cause.DRIVER, str(exc), RankState.UNKNOWN)
        observed = _STATES.get(reply.get("state") or "", RankState.UNKNOWN)
        seconds = float(reply["seconds"])
        if reply["ok"]:
            return Outcome(observed=observed, seconds=seconds)
        cause = Cause.FAILED if observed is RankState.FAILED else None
        cause = cause or _CAUSES.get(reply["error"], Cause.DRIVER)
        outcome = failed(rank, cause, str(reply["message"]), observed)
        return Outcome(observed=observed, failure=outcome.failure, seconds=seconds)

    async def _ask(self, process: ProcessId, op: str, **arguments: object) -> dict[str, Any]:
        self._op_ids += 1
        request = {"op_id": f"{os.getpid()}-{self._op_ids}", "op": op, **arguments}
        try:
            return await self._ask_worker(process, request)
        except WorkerGone as exc:
            if not exc.is_harmless:
                raise
        return await self._ask_worker(process, request)

    async def _ask_worker(self, process: ProcessId, request: dict[str, object]) -> dict[str, Any]:
        worker = self._worker(process)
        try:
            return await worker.ask(request)
        except WorkerGone:
            if self._workers.get(process) is worker:
                del self._workers[process]
                worker.close()
            raise

    def _worker(self, process: ProcessId) -> Worker:
        worker = self._workers.get(process)
        if worker is None:
            op_file = self.context.directory / _op_file_name(process)
            worker = Worker(process, op_file, self.context.cuda_library)
            self._workers[process] = worker
        return worker


class Worker:
    """The helper process of one rank, as the daemon sees it. Requests go one at a time."""

    def __init__(self, target: ProcessId, op_file: Path, library: str | None) -> None:
        self._target = target
        self._op_file = op_file
        self._library = library
        self._turn = asyncio.Lock()
        self._closed = False
        self._writer: asyncio.StreamWriter | None = None
        self._process: subprocess.Popen[bytes] | None = None
        #: An earlier daemon's, or this very one, that is still in a call on a rank that is dead.
        self._predecessor: ProcessId | None = None
        self._started = asyncio.create_task(self._start(), name=f"worker of {target.pid}")
        # Whoever asks hears of a failure; nobody may ever ask.
        self._started.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def ask(self, request: dict[str, object]) -> dict[str, Any]:
        """Send one request and return its reply. Only a lock has a limit: the driver keeps it."""
        async with self._turn:
            reader = await self._reader()
            assert self._writer is not None
            self._writer.write(json.dumps(request).encode() + b"\n")
            try:
                line = await reader.readline()
            except (ConnectionError, ValueError) as exc:
                raise await self._gone(f"its worker broke off: {exc}", request) from exc
            if not line:
                raise await self._gone(self._why_gone(), request)
            reply: dict[str, Any] = json.loads(line)
            return reply

    async def _reader(self) -> asyncio.StreamReader:
        try:
            return await asyncio.shield(self._started)
        except asyncio.CancelledError:
            if self._closed:
                # It is the start that was given up; whoever asked waits for an answer.
                raise WorkerGone(self._why_gone()) from None
            raise

    async def _gone(self, text: str, request: dict[str, object]) -> WorkerGone:
        """Return the exception for a worker that ended while it was asked something."""
        gone = WorkerGone(text)
        if not self._closed:
            # Whatever changes its target is written down before it is tried.
            record = await self._last_operation()
            gone.is_harmless = record is None or record.op_id != request["op_id"]
        return gone

    async def _last_operation(self) -> OpRecord | None:
        try:
            return await asyncio.to_thread(read_op_file, str(self._op_file))
        except (OpFileError, OSError) as exc:
            text = f"what an earlier worker did is not known: {exc}; remove the file to go on"
            raise WorkerGone(text) from exc

    def close(self) -> None:
        """Close the connection; the worker ends after the call that it is in."""
        self._closed = True
        self._started.cancel()
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            _reap(self._process)
        if identify(self._target.pid) != self._target:
            self._predecessor = _unfinished(self._op_file)
            with contextlib.suppress(OSError):
                self._op_file.unlink()

    def end(self) -> None:
        """End what still calls a driver that will not answer, because its target is dead."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        if self._predecessor is not None:
            _kill(self._predecessor)

    async def _start(self) -> asyncio.StreamReader:
        await self._await_predecessor()
        ours, theirs = socket.socketpair()
        try:
            self._process = await asyncio.to_thread(self._spawn, theirs)
            ours.setblocking(False)
            reader, self._writer = await asyncio.open_unix_connection(
                sock=ours, limit=MAX_LINE_BYTES
            )
        except BaseException as exc:
            # A worker whose other end is closed ends by itself.
            ours.close()
            if isinstance(exc, OSError):
                raise WorkerGone(f"its worker could not be started: {exc}") from exc
            raise
        finally:
            theirs.close()
        try:
            line = await asyncio.wait_for(reader.readline(), START_LIMIT_S)
        except TimeoutError as exc:
            text = f"its worker did not attach to the driver within {START_LIMIT_S:g} s"
            raise WorkerGone(text) from exc
        hello = json.loads(line) if line else {"ready": False, "message": self._why_gone()}
        if not hello["ready"]:
            raise WorkerGone(f"the driver cannot be used: {hello['message']}")
        return reader

    def _spawn(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        command = worker_command(
            fd=theirs.fileno(),
            target_pid=self._target.pid,
            target_start_time=self._target.start_time,
            op_file=str(self._op_file),
            library=self._library,
        )
        return subprocess.Popen(
            command,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )

    async def _await_predecessor(self) -> None:
        """Wait for a worker of an earlier daemon that is still in a call on this rank."""
        record = await self._last_operation()
        if record is None or record.result is not None:
            return
        worker = ProcessId(*record.worker)
        if identify(worker.pid) != worker:
            return
        loop = asyncio.get_running_loop()
        try:
            pidfd = os.pidfd_open(worker.pid)
        except ProcessLookupError:
            return
        gone = asyncio.Event()
        loop.add_reader(pidfd, gone.set)
        try:
            # No limit: two callers in one target wedge it for ever. The core's alarm names it.
            await gone.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)

    def _why_gone(self) -> str:
        code = self._process.poll() if self._process is not None else None
        if self._closed:
            gone = identify(self._target.pid) != self._target
            return "its process has ended" if gone else "the daemon let its worker go"
        return f"its worker ended with status {code}" if code is not None else "its worker ended"


def _op_file_name(process: ProcessId) -> str:
    return f"{process.pid}-{process.start_time}.json"


def _sweep(directory: Path) -> None:
    for path in directory.glob("[0-9]*-[0-9]*.json"):
        pid = path.stem.partition("-")[0]
        process = identify(int(pid)) if pid.isdigit() else None
        if process is None or path.name != _op_file_name(process):
            if (worker := _unfinished(path)) is not None:
                _kill(worker)
            path.unlink(missing_ok=True)


def _unfinished(op_file: Path) -> ProcessId | None:
    """Return the worker that is in a call, as far as it wrote."""
    with contextlib.suppress(OpFileError, OSError):
        record = read_op_file(str(op_file))
        if record is not None and record.result is None:
            return ProcessId(*record.worker)
    return None


def _kill(worker: ProcessId) -> None:
    """End a worker that is no child of ours, and nobody else who has its pid by now."""
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(worker.pid)
        try:
            if identify(worker.pid) == worker:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Wait for a worker in the background: it ends when its call does, which may take long."""
    loop = asyncio.get_running_loop()
    if process.poll() is not None:
        return
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return

    def ended() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        process.poll()

    loop.add_reader(pidfd, ended)
