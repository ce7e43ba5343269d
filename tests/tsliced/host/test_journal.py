"""The journal: what is remembered over kill -9, a reboot, a full disk and lost files."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import journal_victim
import pytest
from journal_records import STANDING, lease, lease_ended, session

import tsliced
from tsliced.core.actions import Record
from tsliced.host import kept_log, record_codec
from tsliced.host.durable_store import RUN_STRIDE, DurableStore
from tsliced.host.journal import Journal, JournalCode, JournalError, JournalLimits, read_records

LIMIT_S = 30.0
#: 2026-06-01 00:00 UTC.
NOW = 1_780_272_000.0
SECONDS_OF_2026 = 151 * 86400
NOBODY = 65534
#: The repository first: a directory of tests that is named like a package must not be taken for it.
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(
        [str(Path(tsliced.__file__).parents[1]), *(path for path in sys.path if path)]
    ),
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "state" / "tsliced"


@contextmanager
def opened(
    directory: Path,
    *,
    now_unix: float = NOW,
    limits: JournalLimits | None = None,
    boot: str | None = None,
) -> Iterator[Journal]:
    journal = Journal.open(directory, now_unix=now_unix, limits=limits, boot=boot)
    try:
        yield journal
    finally:
        journal.close()


def write_once(directory: Path, records: tuple[Record, ...], *, ceiling: int = 0) -> int:
    """Begin a journal with these records; return its generation."""
    with opened(directory) as journal:
        journal.write(records)
        asyncio.run(journal.reserve(ceiling))
        return journal.generation


# --- a new journal and an old one -----------------------------------------------------------------


def test_a_new_journal_is_empty_and_its_generation_is_the_seconds_since_2026(
    directory: Path,
) -> None:
    with opened(directory) as journal:
        assert (journal.generation, journal.ceiling) == (SECONDS_OF_2026, 0)
        assert (journal.load(), tuple(journal.warnings)) == ((), ())


def test_a_clock_before_2026_gives_generation_one(directory: Path) -> None:
    with opened(directory, now_unix=0.0) as journal:
        assert journal.generation == 1


def test_only_its_owner_can_read_it(directory: Path) -> None:
    write_once(directory, STANDING)
    with opened(directory) as journal:
        journal.write([lease(5)])
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}
    assert set(modes.values()) == {0o600}
    assert {"journal.db", "journal.db-wal"} <= set(modes)


def test_a_directory_that_others_can_write_to_is_refused(directory: Path) -> None:
    directory.mkdir(parents=True)
    directory.chmod(0o777)
    with pytest.raises(JournalError, match="chmod it to 700"):
        Journal.open(directory, now_unix=NOW)
    directory.chmod(0o755)
    with opened(directory):
        pass


def test_everything_is_there_after_reopening(directory: Path) -> None:
    """G8."""
    generation = write_once(directory, STANDING, ceiling=4096)
    with opened(directory, now_unix=NOW + 5000) as journal:
        assert journal.load() == STANDING
        assert (journal.generation, journal.ceiling) == (generation, 4096)
        assert tuple(journal.warnings) == ()


def test_what_was_written_is_loaded_at_once(directory: Path) -> None:
    with opened(directory) as journal:
        journal.write([lease(2), lease(1)])
        journal.write([])
        journal.write([lease_ended(1)])
        assert journal.load() == (lease(2), lease_ended(1))


def test_a_second_daemon_is_refused_by_the_pid_of_the_first(directory: Path) -> None:
    with opened(directory) as journal:
        journal.write(STANDING)
        with pytest.raises(JournalError, match=f"pid {os.getpid()}") as caught:
            Journal.open(directory, now_unix=NOW)
        assert caught.value.code is JournalCode.LOCKED
        journal.write([lease(9)])
    with opened(directory) as journal:
        assert len(journal.load()) == len(STANDING) + 1


def test_a_journal_that_could_not_be_opened_does_not_stay_locked(directory: Path) -> None:
    write_once(directory, STANDING)
    (directory / "kept-99999999.new").mkdir()
    with pytest.raises(JournalError):
        Journal.open(directory, now_unix=NOW)
    (directory / "kept-99999999.new").rmdir()
    with opened(directory) as journal:
        assert journal.load() == STANDING


def test_a_closed_journal_refuses_and_closing_twice_is_harmless(directory: Path) -> None:
    journal = Journal.open(directory, now_unix=NOW)
    journal.close()
    journal.close()
    with pytest.raises(JournalError) as caught:
        journal.write(STANDING)
    assert caught.value.code is JournalCode.CLOSED
    with pytest.raises(JournalError) as caught:
        asyncio.run(journal.reserve(1))
    assert caught.value.code is JournalCode.CLOSED


def test_records_can_be_read_without_a_daemon_and_without_a_change(directory: Path) -> None:
    write_once(directory, STANDING)
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    assert read_records(directory) == STANDING
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    with pytest.raises(JournalError, match="cannot read"):
        read_records(directory / "none")


# --- durable numbers ------------------------------------------------------------------------------


def test_a_ceiling_only_rises_and_each_rise_is_one_fsync(directory: Path) -> None:
    """G2."""
    with opened(directory) as journal:
        before = journal.fsync_count
        for ceiling in (4096, 8192, 4096, 8192):
            asyncio.run(journal.reserve(ceiling))
        assert (journal.ceiling, journal.fsync_count - before) == (8192, 2)
        assert journal.fsync_p50_s is not None
        assert 0 < journal.fsync_p50_s < LIMIT_S


def test_the_loop_goes_on_writing_while_a_ceiling_waits_for_the_disk(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No grant and no move waits for a disk (G2's blocks are reserved ahead)."""
    go_on = threading.Event()
    real = DurableStore.save_numbers

    def slow(self: DurableStore, numbers: object) -> None:
        assert go_on.wait(LIMIT_S)
        real(self, numbers)  # type: ignore[arg-type]  # passed through as it came

    async def scenario(journal: Journal) -> None:
        reserving = asyncio.create_task(journal.reserve(4096))
        await asyncio.sleep(0)
        for number in range(100):
            journal.write([lease(number)])
        assert (journal.ceiling, reserving.done()) == (0, False)
        go_on.set()
        await reserving
        assert journal.ceiling == 4096

    with opened(directory) as journal:
        monkeypatch.setattr(DurableStore, "save_numbers", slow)
        asyncio.run(scenario(journal))


def test_too_many_jobs_for_a_hanging_disk_are_refused_and_records_are_still_written(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G9."""
    started, go_on = threading.Event(), threading.Event()

    def hang(self: DurableStore, events: object) -> None:
        started.set()
        assert go_on.wait(LIMIT_S)

    monkeypatch.setattr(DurableStore, "append_history", hang)
    with opened(directory, limits=JournalLimits(max_jobs=2, cut_bytes=100)) as journal:
        history = journal.open_history(10)
        for number in range(8):
            history.append("granted", "info", {}, NOW)
            history.flush()
            # The first is at work, two wait, and there is no room for the rest.
            assert number or started.wait(LIMIT_S)
        assert journal.history_lost == 5
        with pytest.raises(JournalError) as caught:
            asyncio.run(journal.reserve(1))
        assert caught.value.code is JournalCode.BUSY
        journal.write(STANDING)
        assert journal.background_error is not None
        go_on.set()
    with opened(directory) as journal:
        assert journal.load() == STANDING


# --- something is lost ----------------------------------------------------------------------------


def test_after_a_reboot_only_the_numbers_and_the_events_are_left(directory: Path) -> None:
    """G2: numbers go on. Processes, leases and device state died with the machine."""
    with opened(directory, boot="before") as journal:
        journal.write(STANDING)
        asyncio.run(journal.reserve(4096))
        journal.open_history(10).append("granted", "info", {}, NOW)
    # A power cut may leave anything in a file that was never synced.
    (segment,) = directory.glob("kept-*.log")
    segment.write_bytes(os.urandom(100))
    with opened(directory, now_unix=NOW + 60, boot="after") as journal:
        assert (journal.load(), tuple(journal.warnings)) == ((), ())
        assert (journal.generation, journal.ceiling) == (SECONDS_OF_2026, 4096)
        journal.write(STANDING)
    with opened(directory, boot="after") as journal:
        assert journal.load() == STANDING


@pytest.mark.parametrize("now_unix", [NOW - 1e6, NOW, NOW + 60])
def test_a_lost_log_begins_a_higher_generation_whatever_the_clock_says(
    directory: Path, now_unix: float
) -> None:
    """G2."""
    generation = write_once(directory, STANDING, ceiling=4096)
    for path in directory.glob("kept-*"):
        path.unlink()
    with opened(directory, now_unix=now_unix) as journal:
        assert journal.load() == ()
        assert journal.generation > generation
        assert journal.ceiling == 0
        assert "lost" in journal.warnings[0]
        again = journal.generation
    with opened(directory, now_unix=now_unix + 99) as journal:
        assert (journal.generation, tuple(journal.warnings)) == (again, ())


@pytest.mark.parametrize("now_unix", [NOW - 1e6, NOW, NOW + 60])
def test_a_lost_database_begins_a_higher_generation_and_keeps_the_records(
    directory: Path, now_unix: float
) -> None:
    """G2, G8."""
    generation = write_once(directory, STANDING, ceiling=4096)
    for path in directory.glob("journal.db*"):
        path.unlink()
    with opened(directory, now_unix=now_unix) as journal:
        assert journal.load() == STANDING
        assert journal.generation > generation
        assert journal.ceiling == 0
        assert "database" in journal.warnings[0]


def test_a_lost_directory_begins_a_higher_generation_if_the_clock_moved(directory: Path) -> None:
    """G2."""
    generation = write_once(directory, STANDING, ceiling=4096)
    shutil.rmtree(directory)
    with opened(directory, now_unix=NOW + 1) as journal:
        assert (journal.generation, journal.load()) == (generation + 1, ())


def test_a_corrupt_database_is_moved_aside_and_named(directory: Path) -> None:
    generation = write_once(directory, STANDING, ceiling=4096)
    (directory / "journal.db").write_bytes(b"not a database" * 100)
    with opened(directory, now_unix=NOW + 60) as journal:
        aside = directory / f"journal.db.corrupt-{int(NOW) + 60}"
        assert aside.read_bytes() == b"not a database" * 100
        assert str(aside) in journal.warnings[0]
        assert journal.load() == STANDING
        assert (journal.generation, journal.ceiling) == (generation + 60, 0)


def test_a_corrupt_log_is_moved_aside_and_named(directory: Path) -> None:
    generation = write_once(directory, STANDING, ceiling=4096)
    (segment,) = directory.glob("kept-*.log")
    damaged = bytearray(segment.read_bytes())
    damaged[-1] ^= 1
    segment.write_bytes(damaged)
    with opened(directory, now_unix=NOW) as journal:
        aside = directory / f"{segment.name}.corrupt-{int(NOW)}"
        assert aside.read_bytes() == bytes(damaged)
        assert segment.name in journal.warnings[0]
        assert f"corrupt-{int(NOW)}" in journal.warnings[0]
        assert (journal.load(), journal.generation) == ((), generation + 1)
        journal.write(STANDING)
    with opened(directory) as journal:
        assert (journal.load(), tuple(journal.warnings)) == (STANDING, ())


def test_a_journal_of_a_newer_version_is_refused_and_untouched(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_log, "SCHEMA", record_codec.SCHEMA + 1)
    write_once(directory, STANDING)
    monkeypatch.undo()
    before = read_segments(directory)
    with pytest.raises(JournalError, match="newer tsliced") as caught:
        Journal.open(directory, now_unix=NOW)
    assert caught.value.code is JournalCode.NEWER
    assert read_segments(directory) == before


def read_segments(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("kept-*")}


def test_a_batch_that_was_cut_short_by_a_kill_is_dropped_and_said(directory: Path) -> None:
    write_once(directory, STANDING)
    (segment,) = directory.glob("kept-*.log")
    with segment.open("ab") as file:
        file.write(b"\x50\x00\x00\x00half")
    with opened(directory) as journal:
        assert journal.load() == STANDING
        assert "dropped 8 bytes" in journal.warnings[0]


# --- the log is cut -------------------------------------------------------------------------------


def segment_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("kept-*.log"))


def test_a_checkpoint_cuts_the_log_down_to_what_stands(directory: Path) -> None:
    async def scenario(journal: Journal) -> None:
        for number in range(2000):
            journal.write([lease(number)])
            journal.write([lease_ended(number, slots=8)])
        before = segment_bytes(directory)
        await journal.checkpoint()
        assert segment_bytes(directory) < before / 20
        journal.write([lease(5000)])
        await journal.checkpoint()

    with opened(directory) as journal:
        asyncio.run(scenario(journal))
        standing = journal.load()
        assert len(standing) == 9
    with opened(directory) as journal:
        assert journal.load() == standing


def test_a_checkpoint_that_fails_loses_nothing_and_the_next_one_works(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise JournalError(JournalCode.FULL, "full")

    with opened(directory) as journal:
        journal.write(STANDING)
        for name in ("Segment", "cut"):
            monkeypatch.setattr(kept_log, name, full)
            monkeypatch.setattr("tsliced.host.journal.Segment", kept_log.Segment)
            with pytest.raises(JournalError):
                asyncio.run(journal.checkpoint())
            assert journal.background_error is not None
            monkeypatch.undo()
        assert read_records(directory) == STANDING
        asyncio.run(journal.checkpoint())
        assert journal.background_error is None
        assert read_records(directory) == STANDING
        assert len(list(directory.glob("kept-*.log"))) == 2


def test_the_log_stays_bounded_without_anybody_asking(directory: Path) -> None:
    """G9."""
    limits = JournalLimits(cut_bytes=20_000)

    async def scenario(journal: Journal) -> int:
        largest = 0
        for number in range(5000):
            journal.write([lease(number), lease_ended(number, slots=8)])
            if number % 20 == 0:
                # Passes through the helper thread's queue, so a cut gets its turn.
                await journal.reserve(number)
                largest = max(largest, segment_bytes(directory))
        return largest

    with opened(directory, limits=limits) as journal:
        assert asyncio.run(scenario(journal)) < 4 * limits.cut_bytes
        standing = journal.load()
        assert journal.background_error is None
    with opened(directory) as journal:
        assert journal.load() == standing


def test_a_large_state_is_not_written_anew_for_every_few_changes(directory: Path) -> None:
    with opened(directory, limits=JournalLimits(cut_bytes=1000)) as journal:
        journal.write([lease(number) for number in range(2000)])
        asyncio.run(journal.checkpoint())
        before = sorted(directory.glob("kept-*.log"))
        for number in range(200):
            journal.write([lease_ended(number)])
        asyncio.run(journal.reserve(1))
        assert sorted(directory.glob("kept-*.log")) == before


# --- event history --------------------------------------------------------------------------------


def test_events_are_there_after_a_restart_and_numbers_go_on_higher(directory: Path) -> None:
    with opened(directory) as journal:
        history = journal.open_history(100)
        for n in range(5):
            history.append("granted", "info", {"n": n}, NOW + n)
        history.flush()
    with opened(directory) as journal:
        history = journal.open_history(3)
        history.append("released", "info", {"job": "a"}, NOW)
        before, latest = history.since(None, 10).events[1:]
        assert before == {"seq": 5, "at": NOW + 4, "kind": "granted", "level": "info", "n": 4}
        assert (latest["kind"], latest["seq"]) == ("released", RUN_STRIDE)


def test_events_that_cannot_be_read_do_not_stop_the_daemon(directory: Path) -> None:
    with opened(directory) as journal:
        journal._store._db.execute("INSERT INTO history VALUES (1, 1, ?, 0, 0)", (b"\xc1",))
        history = journal.open_history(10)
        assert history.since(None, 10)[:2] == ([], RUN_STRIDE)
        assert "starts anew" in journal.warnings[-1]


# --- kill -9 --------------------------------------------------------------------------------------


class Victim:
    """A run of `journal_victim.py`."""

    def __init__(self, directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, journal_victim.__file__, str(directory)],
            stdout=subprocess.PIPE,
            env=ENVIRONMENT,
        )

    def __enter__(self) -> Victim:
        return self

    def __exit__(self, *exc: object) -> None:
        # A test that fails must not leave it running.
        self.process.kill()
        self.process.wait(LIMIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def kill_after(self, seconds: float) -> dict[str, list[int]]:
        """Kill it so long after its first word; return the numbers it said, by word."""
        assert self.process.stdout is not None
        output = b""
        kill_at = None
        limit_at = time.monotonic() + LIMIT_S
        while chunk := self._read(kill_at or limit_at):
            output += chunk
            kill_at = kill_at or time.monotonic() + seconds
            if time.monotonic() >= kill_at:
                break
        self.process.send_signal(signal.SIGKILL)
        output += self.process.stdout.read()
        assert self.process.wait(LIMIT_S) == -signal.SIGKILL
        said: dict[str, list[int]] = {}
        for line in output.decode().splitlines():
            word, number = line.split()
            said.setdefault(word, []).append(int(number))
        return said

    def _read(self, until: float) -> bytes:
        assert self.process.stdout is not None
        wait_s = max(0.0, until - time.monotonic())
        ready, _, _ = select.select([self.process.stdout], [], [], wait_s)
        return os.read(self.process.stdout.fileno(), 65536) if ready else b""


def test_what_was_acknowledged_before_a_kill_is_there_after_it(directory: Path) -> None:
    """G2, G8: leases, answers, ceilings and the order of event numbers survive kill -9."""
    rng = random.Random(9)
    last_event = 0
    generations = set()
    for _ in range(8):
        with Victim(directory) as victim:
            said = victim.kill_after(rng.uniform(0.0, 0.15))
        generations |= set(said["generation"])
        with opened(directory, now_unix=time.time()) as journal:
            standing = journal.load()
            batches = journal_victim.batches_in(standing)
            acknowledged = max(said.get("batch", [0]))
            # The last batch may have been written but not yet acknowledged.
            assert acknowledged <= batches
            assert acknowledged == 0 or batches <= acknowledged + 1
            if batches:
                assert set(standing) == journal_victim.standing_after(batches)
                assert len(standing) == len(set(standing))
            assert journal.ceiling >= max(said.get("ceiling", [0]))
        events = said.get("event", [])
        assert events == sorted(set(events))
        assert not events or events[0] > last_event
        last_event = max(events, default=last_event)
    assert batches > 1000, "the victim was killed before it had done anything"
    assert len(generations) == 1


def test_the_lock_of_a_killed_daemon_is_free_and_that_of_a_live_one_is_not(
    directory: Path,
) -> None:
    with Victim(directory) as victim:
        assert victim._read(time.monotonic() + LIMIT_S)
        with pytest.raises(JournalError, match=f"pid {victim.process.pid}") as caught:
            Journal.open(directory, now_unix=NOW)
        assert caught.value.code is JournalCode.LOCKED
        victim.kill_after(0.0)
    with opened(directory):
        pass


# --- disks ----------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", str(mount)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except FileNotFoundError:
        pytest.skip("there is no mount program")
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted: {done.stderr.strip()}")
    yield mount
    subprocess.run(["umount", str(mount)], check=True, timeout=LIMIT_S)


def fill_disk(mount: Path) -> Path:
    filler = mount / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    assert shutil.disk_usage(mount).free == 0
    return filler


def refusal_of(journal: Journal, record: Record) -> JournalCode | None:
    try:
        journal.write([record])
    except JournalError as exc:
        return exc.code
    return None


def reserve_until_full(journal: Journal) -> int:
    """Raise the ceiling until the disk is full; return the last one that is durable."""
    ceiling = journal.ceiling
    with contextlib.suppress(JournalError):
        while ceiling < 8192:
            asyncio.run(journal.reserve(ceiling + 1))
            ceiling += 1
    assert ceiling < 8192, "the disk never was full"
    with pytest.raises(JournalError) as caught:
        asyncio.run(journal.reserve(8192))
    assert caught.value.code is JournalCode.FULL
    return ceiling


def test_a_full_disk_refuses_records_and_numbers_and_goes_on_when_there_is_room(
    small_disk: Path,
) -> None:
    """G2: no durable block on a full disk, and nothing that failed is remembered."""
    directory = small_disk / "tsliced"
    with opened(directory) as journal:
        journal.write([session("s-1")])
        asyncio.run(journal.reserve(4096))
        filler = fill_disk(small_disk)
        leases = [lease(number) for number in range(300)]
        refusals = [refusal_of(journal, each) for each in leases]
        acknowledged = (session("s-1"), *leases[: refusals.index(JournalCode.FULL)])
        assert set(refusals[refusals.index(JournalCode.FULL) :]) == {JournalCode.FULL}
        ceiling = reserve_until_full(journal)
        with pytest.raises(JournalError):
            asyncio.run(journal.checkpoint())
        assert journal.ceiling == ceiling
        assert journal.load() == acknowledged == read_records(directory)

        filler.unlink()
        journal.write([lease(1000)])
        asyncio.run(journal.reserve(100_000))
        asyncio.run(journal.checkpoint())
    with opened(directory) as journal:
        assert journal.load() == (*acknowledged, lease(1000))
        assert (journal.ceiling, tuple(journal.warnings)) == (100_000, ())


def test_a_start_on_a_full_disk_is_refused_and_loses_nothing(small_disk: Path) -> None:
    directory = small_disk / "tsliced"
    many = tuple(lease(number) for number in range(1000))
    generation = write_once(directory, many, ceiling=4096)
    filler = fill_disk(small_disk)
    with pytest.raises(JournalError) as caught:
        Journal.open(directory, now_unix=NOW + 60)
    assert caught.value.code in (JournalCode.FULL, JournalCode.IO)
    filler.unlink()
    with opened(directory, now_unix=NOW + 60) as journal:
        assert journal.load() == many
        assert (journal.generation, journal.ceiling) == (generation, 4096)


def test_a_full_disk_costs_events_of_which_the_number_is_known(small_disk: Path) -> None:
    with opened(small_disk / "tsliced") as journal:
        history = journal.open_history(100)
        fill_disk(small_disk)
        for _ in range(50):
            history.append("granted", "info", {"text": "x" * 5000}, NOW)
        history.flush()
        # The queue is in order, so the batch before this has been tried.
        with pytest.raises(JournalError):
            asyncio.run(journal.checkpoint())
        assert journal.history_lost == 50
        assert len(history.since(None, 100).events) == 50


#: Open the journal in argv[1] as an ordinary user, after everything is imported: the interpreter
#: itself may lie where that user cannot read.
READER = f"""
import os, sys
from pathlib import Path
from tsliced.host.journal import Journal, JournalError
if os.geteuid() == 0:
    os.setgroups([])
    os.setresgid({NOBODY}, {NOBODY}, {NOBODY})
    os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
try:
    Journal.open(Path(sys.argv[1]), now_unix=0.0)
except JournalError as exc:
    print(exc.code.value, exc)
"""


def open_as_a_user(directory: Path) -> str:
    return subprocess.run(
        [sys.executable, "-c", READER, str(directory)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
        timeout=LIMIT_S,
    ).stdout


@pytest.mark.parametrize("begun", [False, True])
def test_a_directory_that_cannot_be_written_to_is_refused_with_the_remedy(begun: bool) -> None:
    # pytest's own directories cannot be entered by another user.
    with tempfile.TemporaryDirectory() as base:
        os.chmod(base, 0o755)
        directory = Path(base) / "tsliced"
        directory.mkdir(mode=0o755)
        if begun:
            write_once(directory, STANDING)
        directory.chmod(0o555)
        try:
            said = open_as_a_user(directory)
        finally:
            directory.chmod(0o755)
    assert said.startswith("journal_read_only ")
    assert "make the directory writable" in said
