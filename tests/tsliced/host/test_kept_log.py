"""The log of kept records: torn, damaged and half-cut files."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from journal_records import lease, lease_ended, session

from tsliced.core.actions import Record
from tsliced.host import kept_log, record_codec
from tsliced.host.journal_error import JournalCode, JournalError
from tsliced.host.kept_log import LogIdentity, Segment, replay, segment_path
from tsliced.host.record_codec import make_packer

BOOT = "11111111-2222-3333-4444-555555555555"
IDENTITY = LogIdentity(boot=BOOT, generation=77)


def write_log(path: Path, *batches: list[Record]) -> list[int]:
    """Write a segment of batches; return its size after the header and after each batch."""
    pack = make_packer()
    segment = Segment(path, IDENTITY)
    sizes = [segment.size]
    for batch in batches:
        segment.append(pack(batch))
        sizes.append(segment.size)
    segment.close()
    return sizes


def standing(directory: Path) -> tuple[Record, ...]:
    return replay(directory, boot=BOOT).state.records()


BATCHES: list[list[Record]] = [[session("s-1")], [lease(1), lease(2)], [lease_ended(1)], [lease(3)]]
#: What stands after so many batches.
STANDS: list[tuple[Record, ...]] = [
    (),
    (session("s-1"),),
    (session("s-1"), lease(1), lease(2)),
    (session("s-1"), lease(2), lease_ended(1)),
    (session("s-1"), lease(2), lease(3), lease_ended(1)),
]


def test_what_was_appended_is_read_back(tmp_path: Path) -> None:
    write_log(segment_path(tmp_path, 1), *BATCHES)
    found = replay(tmp_path, boot=BOOT)
    assert (found.state.records(), found.identity, found.torn_bytes) == (STANDS[-1], IDENTITY, 0)


def test_a_log_that_ends_anywhere_gives_the_batches_that_are_whole(tmp_path: Path) -> None:
    path = segment_path(tmp_path, 1)
    sizes = write_log(path, *BATCHES)
    data = path.read_bytes()
    for length in range(len(data) + 1):
        path.write_bytes(data[:length])
        found = replay(tmp_path, boot=BOOT)
        whole = sum(size <= length for size in sizes)
        assert found.state.records() == STANDS[max(0, whole - 1)], length
        assert found.torn_bytes == length - ([0, *sizes][whole])


def test_a_flipped_bit_anywhere_never_gives_a_wrong_record(tmp_path: Path) -> None:
    path = segment_path(tmp_path, 1)
    write_log(path, *BATCHES)
    data = path.read_bytes()
    refusals = []
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        try:
            assert standing(tmp_path) in STANDS
        except JournalError as exc:
            refusals.append(exc.code)
    assert set(refusals) == {JournalCode.CORRUPT}
    # The others made a frame look longer than the file is: a batch that was being written.
    assert len(refusals) > len(data) * 0.9


def test_batches_after_an_incomplete_one_are_damage_unless_a_snapshot_comes_between(
    tmp_path: Path,
) -> None:
    write_log(segment_path(tmp_path, 1), *BATCHES)
    os.truncate(segment_path(tmp_path, 1), segment_path(tmp_path, 1).stat().st_size - 1)
    write_log(segment_path(tmp_path, 2))
    assert standing(tmp_path) == STANDS[3]
    write_log(segment_path(tmp_path, 2), BATCHES[3])
    with pytest.raises(JournalError, match="follow an incomplete one"):
        standing(tmp_path)
    kept_log.write_whole(segment_path(tmp_path, 2), IDENTITY, STANDS[2]).close()
    assert standing(tmp_path) == STANDS[2]


def test_a_log_of_another_boot_counts_for_nothing(tmp_path: Path) -> None:
    write_log(segment_path(tmp_path, 1), *BATCHES)
    found = replay(tmp_path, boot="another")
    assert (found.state.records(), found.identity) == ((), None)


def test_a_log_of_a_newer_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_log, "SCHEMA", record_codec.SCHEMA + 1)
    write_log(segment_path(tmp_path, 1), *BATCHES)
    monkeypatch.undo()
    with pytest.raises(JournalError, match="newer tsliced") as caught:
        standing(tmp_path)
    assert caught.value.code is JournalCode.NEWER


def test_a_batch_above_the_limit_is_refused_and_the_next_one_is_not(tmp_path: Path) -> None:
    segment = Segment(segment_path(tmp_path, 1), IDENTITY)
    with pytest.raises(JournalError) as caught:
        segment.append(bytes(kept_log.MAX_FRAME_BYTES + 1))
    segment.append(make_packer()(BATCHES[0]))
    segment.close()
    assert caught.value.code is JournalCode.TOO_LARGE
    assert standing(tmp_path) == STANDS[1]


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Let this process write no file beyond `size`, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [0, 1, 20])
def test_an_append_that_fits_only_in_part_leaves_no_trace(tmp_path: Path, room: int) -> None:
    pack = make_packer()
    segment = Segment(segment_path(tmp_path, 1), IDENTITY)
    segment.append(pack(BATCHES[0]))
    size = segment.size
    with file_size_limit(size + room), pytest.raises(JournalError) as caught:
        segment.append(pack(BATCHES[1]))
    assert caught.value.code is JournalCode.FULL
    assert segment.path.stat().st_size == segment.size == size
    segment.append(pack([lease(2)]))
    segment.close()
    assert standing(tmp_path) == (session("s-1"), lease(2))


def test_nothing_is_appended_behind_an_incomplete_batch_that_cannot_be_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, size: int) -> None:
        raise OSError(5, "Input/output error")

    pack = make_packer()
    segment = Segment(segment_path(tmp_path, 1), IDENTITY)
    segment.append(pack(BATCHES[0]))
    monkeypatch.setattr(os, "ftruncate", refuse)
    with file_size_limit(segment.size + 10), pytest.raises(JournalError):
        segment.append(pack(BATCHES[1]))
    for _ in range(2):
        with pytest.raises(JournalError, match="cut an incomplete write off") as caught:
            segment.append(pack(BATCHES[1]))
    assert caught.value.code is JournalCode.IO
    assert replay(tmp_path, boot=BOOT).torn_bytes == 10
    monkeypatch.undo()
    segment.append(pack(BATCHES[1]))
    segment.close()
    assert standing(tmp_path) == STANDS[2]


class _Crash(BaseException):
    """The process ends here; nothing that it would have cleaned up is cleaned up."""


def crash_after(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let so many of the calls that change files happen, and crash instead of the next."""
    left = [steps]

    def counted(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            if left[0] == 0:
                raise _Crash
            left[0] -= 1
            return real(*args, **kwargs)

        return call

    for name in ("open", "write", "rename"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    monkeypatch.setattr(Path, "unlink", counted(Path.unlink))


def test_a_crash_at_any_step_of_a_cut_changes_nothing_of_what_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G8: the leases and answers after a restart are those before, wherever the cut stopped."""
    for steps in range(100):
        directory = tmp_path / str(steps)
        directory.mkdir()
        for number, batch in enumerate(BATCHES[:3], start=1):
            write_log(segment_path(directory, number), batch)
        # The loop has turned to the next segment before the helper cuts what is before it.
        write_log(segment_path(directory, 4), BATCHES[3])
        crash_after(steps, monkeypatch)
        try:
            kept_log.cut(directory, 3, IDENTITY, STANDS[3])
            crashed = False
        except _Crash:
            crashed = True
        monkeypatch.undo()
        assert standing(directory) == STANDS[4], steps
        if not crashed:
            break
        # What the next start does.
        kept_log.write_whole(segment_path(directory, 5), IDENTITY, STANDS[4]).close()
        kept_log.remove_before(directory, 5)
        assert standing(directory) == STANDS[4], steps
        assert [path.name for path in directory.iterdir()] == ["kept-00000005.log"]
    assert steps == 6, "a draft, its two frames, the rename and two removals are all covered"


def test_a_cut_that_finds_the_disk_full_leaves_the_log_as_it_was(tmp_path: Path) -> None:
    write_log(segment_path(tmp_path, 1), *BATCHES)
    many = [lease(number) for number in range(2000)]
    with file_size_limit(20_000), pytest.raises(JournalError) as caught:
        kept_log.cut(tmp_path, 1, IDENTITY, many)
    assert caught.value.code is JournalCode.FULL
    assert [path.name for path in tmp_path.iterdir()] == ["kept-00000001.log"]
    assert standing(tmp_path) == STANDS[-1]


def test_segments_are_replayed_in_the_order_of_their_numbers_beyond_eight_digits(
    tmp_path: Path,
) -> None:
    write_log(segment_path(tmp_path, 99_999_999), [lease(1)])
    write_log(segment_path(tmp_path, 100_000_000), [lease_ended(1)])
    assert standing(tmp_path) == (lease_ended(1),)
