"""What is fuzzed besides the socket: the files that a daemon finds when it starts.

They are the daemon's own, in a directory that only it can write to, so what damages them is a disk
or another version. Whatever is in them, their readers return or raise the error that is theirs.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import msgpack
from choices import Choices
from journal_records import STANDING

from cuda_ckpt.op_file import OpFileError, read_op_file
from tsliced.host.journal_error import JournalError
from tsliced.host.kept_log import LogIdentity, Segment, replay, segment_path
from tsliced.host.record_codec import make_packer

BOOT = "11111111-2222-3333-4444-555555555555"
FRAME = struct.Struct("<II")
OP_FILE = {
    "target": {"pid": 4242, "start_time": 123456},
    "worker": {"pid": 4243, "start_time": 123457},
    "op_id": "7",
    "op": "checkpoint",
    "started": 1767225600.5,
    "result": {"ok": True, "code": 0, "state": "checkpointed", "seconds": 1.5},
}
#: Of JSON, and of what it should not hold.
TEXTS = [
    *(b"null", b"true", b"-1", b"1e999", b"NaN", b'""', b"[]", b"{}", b"9" * 400, b"9" * 5000),
    *(b"[" * 3000, b'"\\ud800"', b"\xff\xfe", b"{", b",", b'{"pid": 1}', b"\0"),
]


def whole_log(directory: Path) -> bytes:
    """Returns a segment with a record of each kind."""
    path = segment_path(directory, 1)
    segment = Segment(path, LogIdentity(boot=BOOT, generation=77))
    pack = make_packer()
    for record in STANDING:
        segment.append(pack([record]))
    segment.append(pack(STANDING))
    segment.close()
    return path.read_bytes()


def kept_log_target(directory: Path) -> Callable[[bytes], str]:
    """Returns a function that reads a log changed by an input, and says what came of it."""
    whole = whole_log(directory)
    path = segment_path(directory, 1)

    def run(data: bytes) -> str:
        choices = Choices(data)
        data = damaged(whole, choices)
        _put(path, with_checksums(data) if choices.below(4) else data)
        try:
            return f"{len(replay(directory, boot=BOOT).state.records())} records"
        except JournalError as exc:
            return str(exc.code)

    return run


def op_file_target(directory: Path) -> Callable[[bytes], str]:
    """Returns a function that reads an op file changed by an input, and says what came of it."""
    whole = json.dumps(OP_FILE).encode()
    path = directory / "op"
    path.write_bytes(whole)

    def run(data: bytes) -> str:
        choices = Choices(data)
        changed = bytearray(damaged(whole, choices))
        if choices.below(2):
            start = choices.below(256)
            changed[start : start + choices.below(32)] = choices.one_of(TEXTS)
        _put(path, bytes(changed))
        try:
            return type(read_op_file(str(path))).__name__
        except OpFileError:
            return "refused"

    return run


def damaged(whole: bytes, choices: Choices) -> bytes:
    """Changes a few bytes of something: overwritten, inserted, removed, repeated, cut off."""
    data = bytearray(whole)
    for _ in range(choices.below(4)):
        at = (choices.byte() << 8 | choices.byte()) % (len(data) + 1)
        what, some = choices.below(6), choices.some_bytes()
        if what == 0:
            data[at : at + len(some)] = some
        elif what == 1:
            data[at:at] = some
        elif what == 2:
            del data[at : at + len(some)]
        elif what == 3:
            data[at:at] = data[at : at + len(some)]
        elif what == 4:
            data[at:at] = msgpack.packb(choices.one_of([None, -1, 1 << 63, "x", [], {}, [[]] * 9]))
        else:
            del data[at:]
    return bytes(data)


def _put(path: Path, data: bytes) -> None:
    # A new file: some file systems flush one that is cut off and written anew.
    path.unlink()
    path.write_bytes(data)


def with_checksums(data: bytes) -> bytes:
    """Puts the checksums of a log right, so that what is in its frames is looked at."""
    fixed, start = bytearray(data), 0
    while start + FRAME.size <= len(fixed):
        length, _ = FRAME.unpack_from(fixed, start)
        payload = fixed[start + FRAME.size : start + FRAME.size + length]
        FRAME.pack_into(fixed, start, length, zlib.crc32(payload))
        start += FRAME.size + length
    return bytes(fixed)
