"""The journal: what the daemon remembers over its own end.

Three kinds of memory, for three kinds of loss:

* *kept* records survive kill -9. `write` appends them to a log on the event loop (`kept_log`), and
  they are thrown away when the machine has booted since, for all they speak of died with it.
* *durable* numbers, the generation and the ceiling of tokens and epochs, survive a power cut.
  `reserve` makes them so by an fsync in the helper thread (`durable_store`).
* the *event history* is stored in batches by the helper thread, in the same database.

The two files are made so that losing one does not lose the other. Whatever is lost, fencing holds:
a new generation begins, above every generation that the remaining files, or else the clock, know.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import math
import os
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from tsliced.core.actions import Record
from tsliced.host import durable_store, kept_log
from tsliced.host.durable_store import DurableStore, Numbers
from tsliced.host.helper_thread import HelperThread
from tsliced.host.history import Entry, History, HistoryQuery, Page
from tsliced.host.journal_error import JournalCode, JournalError, from_os_error
from tsliced.host.kept_log import LogIdentity, Replay, Segment
from tsliced.host.kept_state import KeptState
from tsliced.host.record_codec import make_packer
from tsliced.host.stored_history import StoredHistory

__all__ = [
    "Journal",
    "JournalCode",
    "JournalError",
    "JournalLimits",
    "check_unused",
    "read_records",
]

T = TypeVar("T")

#: 2026-01-01 00:00 UTC. Generations are seconds since then: they rise with the clock, and fit
#: 32 bits of a token until 2162.
_FIRST_GENERATION_UNIX: Final = 1_767_225_600
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_DATABASE: Final = "journal.db"
_LOCK: Final = "journal.lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalLimits:
    """Limits of the journal, with their units."""

    #: The log is cut when it is larger than this and than the snapshot before it. Reading it back
    #: at a start takes about 0.1 s per MiB.
    cut_bytes: int = 2 << 20
    history_max_bytes: int = 16 << 20
    history_max_age_s: float = math.inf
    #: Jobs that may wait for the helper thread.
    max_jobs: int = 64
    #: How long `close` and `open_history` wait for the jobs that are queued.
    wait_s: float = 10.0


class Journal:
    """An open journal. All methods belong to the event loop's thread."""

    def __init__(
        self,
        directory: Path,
        limits: JournalLimits,
        opened: _Opened,
    ) -> None:
        self.directory = directory
        #: What an operator should know about how the journal was found; empty if all is well.
        self.warnings: Sequence[str] = tuple(opened.warnings)
        #: Why the last background job failed; None: it did not. `reserve` also raises its own.
        self.background_error: JournalError | None = None
        #: Events that could not be stored, because the disk is full or too slow.
        self.history_lost = 0
        self._limits = limits
        self._lock_fd = opened.lock_fd
        self._store = opened.store
        self._numbers = opened.numbers
        self._state = opened.state
        self._segment = opened.segment
        self._number = opened.segment_number
        self._cut_at = max(limits.cut_bytes, opened.segment.size * 2)
        self._spare: Future[Segment] | None = None
        #: The last cut, at work or done.
        self._cut: Future[None] = Future()
        self._pack = make_packer()
        self._helper = HelperThread("journal", max_jobs=limits.max_jobs)
        #: Opened when somebody asks for it.
        self._stored: StoredHistory | None = None
        self._closed = False

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        now_unix: float,
        limits: JournalLimits | None = None,
        boot: str | None = None,
    ) -> Journal:
        """Open the journal in `directory`, or begin one there (mode 0700). Blocks on the disk.

        `boot` is the machine's boot id; None: as the kernel says. Damaged files are renamed to
        ``NAME.corrupt-UNIX`` and named in `warnings`.

        Raises `JournalError`: LOCKED (another daemon has it), NEWER (written by a newer version),
        READ_ONLY, FULL or IO.
        """
        limits = limits or JournalLimits()
        boot = boot or _BOOT_ID.read_text().strip()
        opened = _open(Path(directory), now_unix=now_unix, limits=limits, boot=boot)
        return cls(Path(directory), limits, opened)

    @property
    def generation(self) -> int:
        """First part of every token and epoch: new, and higher, when something was lost."""
        return self._numbers.generation

    @property
    def ceiling(self) -> int:
        """Numbers below it may have been used in this generation; it is durable."""
        return self._numbers.ceiling

    @property
    def fsync_count(self) -> int:
        """Commits that waited for the disk since the journal was opened."""
        return self._store.fsync_count

    @property
    def fsync_p50_s(self) -> float | None:
        """Median of the last fsyncs, in seconds; None: there was none."""
        return statistics.median(self._store.fsync_s.copy()) if self._store.fsync_s else None

    def load(self) -> tuple[Record, ...]:
        """Return what stands now: sessions, faults, tenancies, ranks, leases by round, ends."""
        return self._state.records()

    def write(self, records: Sequence[Record]) -> None:
        """Write records, all or none: once this returns, kill -9 of the daemon cannot lose them.

        Raises `JournalError`; then nothing of them is remembered, and a later call may succeed.
        """
        if not records:
            return
        if self._closed:
            raise JournalError(JournalCode.CLOSED, f"the journal in {self.directory} is closed")
        self._segment.append(self._pack(records))
        for record in records:
            self._state.apply(record)
        if self._segment.size >= self._cut_at:
            self._cut_when_ready()

    async def reserve(self, ceiling: int) -> None:
        """Make `ceiling` durable, in the helper thread. A lower one than the present is no news.

        Raises `JournalError`; then the old ceiling stands.
        """
        await asyncio.wrap_future(self._in_background(lambda: self._raise_ceiling(ceiling)))

    async def checkpoint(self) -> None:
        """Cut the log down to what stands now. `write` arranges for it by itself, by size.

        Raises `JournalError`; then the log is as it was, only longer.
        """
        spare = self._spare or self._prepare_spare()
        try:
            await asyncio.wrap_future(spare)
            # Unless a `write` has turned to it in the meantime.
            if self._spare is spare:
                self._turn_to_spare(spare)
            await asyncio.wrap_future(self._cut)
        except JournalError:
            if self._spare is spare:
                self._spare = None
            raise

    def open_history(self, limit: int, *, recording: bool = True) -> History:
        """Return the event history with its stored tail. Blocks on the disk: call it at start."""
        first_seq, tail = 1, list[Entry]()
        try:
            first_seq = self._in_background(self._store.begin_run).result(self._limits.wait_s)
            reading = self._in_background(lambda: self._store.history_tail(limit))
            tail = reading.result(self._limits.wait_s)
        except JournalError as exc:
            self.warnings = (*self.warnings, f"the event history starts anew: {exc}")
        return History(
            limit,
            tail=tail,
            first_seq=first_seq,
            store=self._store_history,
            recording=recording,
        )

    async def read_history(self, query: HistoryQuery, limit: int, *, end_seq: int) -> Page:
        """Return at most `limit` (at least 1) stored events below number `end_seq`.

        What was handed over to be stored before is there. Raises `JournalError`.
        """
        await asyncio.wrap_future(self._in_background(lambda: None))
        if self._stored is None:
            self._stored = StoredHistory(self.directory / _DATABASE)
        try:
            return await self._stored.page(query, limit, end_seq=end_seq)
        except TimeoutError as exc:
            text = "the disk of the history does not answer, or many others ask it; ask again"
            raise JournalError(JournalCode.BUSY, text) from exc

    def close(self) -> None:
        """Finish what is queued, within a limit, and let the next daemon have the directory."""
        if self._closed:
            return
        self._closed = True
        if self._stored is not None:
            self._stored.close()
        stopped = self._helper.stop(timeout_s=self._limits.wait_s)
        self._segment.close()
        if self._spare is not None and self._spare.done() and not self._spare.exception():
            self._spare.result().close()
        if stopped:
            # Else a dead disk holds the helper in a call; the lock goes when the process does.
            with contextlib.suppress(JournalError):
                self._store.close()
            os.close(self._lock_fd)

    # --- cutting the log: a spare segment, the turn to it, a snapshot in place of the old ones ----

    def _cut_when_ready(self) -> None:
        spare = self._spare
        try:
            if spare is None:
                self._prepare_spare()
            elif spare.done() and spare.exception() is None:
                self._turn_to_spare(spare)
            elif spare.done():
                self._spare = None
                # Most likely a full disk: try again a little later.
                self._cut_at = self._segment.size + self._limits.cut_bytes // 4
        except JournalError as exc:  # the helper is busy; the records are written all the same
            self.background_error = exc

    def _prepare_spare(self) -> Future[Segment]:
        path = kept_log.segment_path(self.directory, self._number + 1)
        identity = self._identity
        self._spare = self._in_background(lambda: Segment(path, identity))
        return self._spare

    def _turn_to_spare(self, spare: Future[Segment]) -> None:
        left, number, identity = self._segment, self._number, self._identity
        records = self._state.records()
        self._segment, self._number, self._spare = spare.result(), number + 1, None

        def cut() -> None:
            left.close()
            size = kept_log.cut(self.directory, number, identity, records)
            # A large state is not written anew for every few changes of it.
            self._cut_at = max(self._limits.cut_bytes, size)

        self._cut = self._in_background(cut)

    @property
    def _identity(self) -> LogIdentity:
        return LogIdentity(boot=self._numbers.boot, generation=self._numbers.generation)

    # --- in the helper thread ---------------------------------------------------------------------

    def _in_background(self, job: Callable[[], T]) -> Future[T]:
        if self._closed:
            raise JournalError(JournalCode.CLOSED, f"the journal in {self.directory} is closed")

        def run() -> T:
            try:
                result = job()
            except JournalError as exc:
                self.background_error = exc
                raise
            self.background_error = None
            return result

        return self._helper.submit(run)

    def _raise_ceiling(self, ceiling: int) -> None:
        now = self._numbers
        if ceiling <= now.ceiling:
            return
        raised = Numbers(boot=now.boot, generation=now.generation, ceiling=ceiling)
        self._store.save_numbers(raised)
        self._numbers = raised

    def _store_history(self, batch: list[Entry]) -> None:
        def store() -> None:
            try:
                self._store.append_history(batch)
            except JournalError:
                self.history_lost += len(batch)
                raise

        try:
            self._in_background(store)
        except JournalError as exc:
            self.history_lost += len(batch)
            self.background_error = exc


def check_unused(directory: Path) -> None:
    """Raise `JournalError` (LOCKED, or that of the operating system) if a daemon has a journal."""
    os.close(_lock(directory))


def read_records(directory: Path, *, boot: str | None = None) -> tuple[Record, ...]:
    """Return what stands in a journal that no daemon has open, without changing anything.

    For rescue. Raises `JournalError` if the log cannot be read.
    """
    boot = boot or _BOOT_ID.read_text().strip()
    return kept_log.replay(directory, boot=boot).state.records()


# --- opening --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    lock_fd: int
    store: DurableStore
    numbers: Numbers
    state: KeptState
    segment: Segment
    segment_number: int
    warnings: list[str]


def _open(directory: Path, *, now_unix: float, limits: JournalLimits, boot: str) -> _Opened:
    warnings: list[str] = []
    _make_directory(directory)
    with contextlib.ExitStack() as undo:
        lock_fd = _lock(directory)
        undo.callback(os.close, lock_fd)
        store = _open_store(directory / _DATABASE, now_unix, limits, warnings)
        undo.callback(store.close)
        saved = store.numbers()
        found = _replay(directory, boot, saved, now_unix, warnings)
        numbers = _choose_numbers(saved, found, boot, now_unix, warnings)
        # The log first: until the numbers say that it is of this boot, nobody relies on it.
        number = max(kept_log.segment_numbers(directory), default=0) + 1
        segment = kept_log.write_whole(
            kept_log.segment_path(directory, number),
            LogIdentity(boot=boot, generation=numbers.generation),
            found.state.records(),
        )
        undo.callback(segment.close)
        kept_log.remove_before(directory, number)
        if numbers != saved:
            store.save_numbers(numbers)
        undo.pop_all()
    return _Opened(
        lock_fd=lock_fd,
        store=store,
        numbers=numbers,
        state=found.state,
        segment=segment,
        segment_number=number,
        warnings=warnings,
    )


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = directory.stat().st_mode
    except OSError as exc:
        raise from_os_error(exc, "create", directory) from exc
    if mode & 0o022:
        text = f"{directory} can be written by other users (mode {mode & 0o777:o}); chmod it to 700"
        raise JournalError(JournalCode.IO, text)


def _lock(directory: Path) -> int:
    """Take the directory for this process, until the descriptor is closed, however it ends."""
    path = directory / _LOCK
    try:
        lock_fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as exc:
        raise from_os_error(exc, "open", path) from exc
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock_fd, 0)
        os.write(lock_fd, b"%d\n" % os.getpid())
    except BlockingIOError as exc:
        owner = os.read(lock_fd, 32).decode("ascii", "replace").strip() or "unknown"
        os.close(lock_fd)
        text = f"another daemon (pid {owner}) uses the journal in {directory}; stop it first"
        raise JournalError(JournalCode.LOCKED, text) from exc
    except OSError as exc:
        os.close(lock_fd)
        raise from_os_error(exc, "lock", path) from exc
    return lock_fd


def _open_store(
    path: Path, now_unix: float, limits: JournalLimits, warnings: list[str]
) -> DurableStore:
    open_it = partial(
        DurableStore,
        path,
        history_max_bytes=limits.history_max_bytes,
        history_max_age_s=limits.history_max_age_s,
    )
    try:
        return open_it()
    except JournalError as exc:
        if exc.code is not JournalCode.CORRUPT:
            raise
        aside = durable_store.set_aside(path, now_unix=now_unix)
        warnings.append(f"{exc}; it was moved to {aside} and a new one was begun")
    return open_it()


def _replay(
    directory: Path, boot: str, saved: Numbers | None, now_unix: float, warnings: list[str]
) -> Replay:
    if saved is not None and saved.boot != boot:
        # Not even read: a power cut may have left anything in it.
        return Replay()
    try:
        found = kept_log.replay(directory, boot=boot)
    except JournalError as exc:
        if exc.code is not JournalCode.CORRUPT:
            raise
        kept_log.set_aside(directory, now_unix=now_unix)
        warnings.append(f"{exc}; the log was moved to *.corrupt-{int(now_unix)} beside it")
        return Replay()
    if found.torn_bytes:
        warnings.append(
            f"dropped {found.torn_bytes} bytes of a batch that the last daemon was writing when it "
            "was killed; nothing of it had been acted on"
        )
    return found


def _choose_numbers(
    saved: Numbers | None, found: Replay, boot: str, now_unix: float, warnings: list[str]
) -> Numbers:
    """Go on with the saved numbers if all is there; else begin a generation above all known."""
    logged = found.identity.generation if found.identity else None
    if saved is not None and (saved.boot != boot or logged == saved.generation):
        return Numbers(boot=boot, generation=saved.generation, ceiling=saved.ceiling)
    if saved is not None and logged is None:
        warnings.append("the log of kept records is lost: sessions, leases and ranks are unknown")
    if saved is None and logged is not None:
        warnings.append("the database of the journal is lost: a new generation begins")
    known = [saved.generation] if saved else []
    known += [logged] if logged is not None else []
    generation = max(1, int(now_unix) - _FIRST_GENERATION_UNIX, *(each + 1 for each in known))
    return Numbers(boot=boot, generation=generation, ceiling=0)
