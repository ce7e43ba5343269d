"""Frames of each version of the protocol, kept as they were sent.

A directory for each version, `1.0` and so on: `frames.bin` holds the frames one behind the other,
and `frames.txt` says in the same order what is in them, a line for each: who sends it, its name in
the tests, the message. A version that a release has spoken is never changed again.

For a new version, write its `frames.txt` with what it adds, and run
`python tests/golden/golden.py VERSION`, which writes the frames.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

HERE = Path(__file__).parent
HEADER_BYTES = 4

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Golden:
    """One frame that was sent once."""

    version: str
    #: ``client`` or ``daemon``
    sender: str
    name: str
    message: Message
    frame: bytes

    def __str__(self) -> str:
        return f"{self.version}-{self.sender}-{self.name}"


def versions() -> list[str]:
    """Returns the versions that are kept, the oldest first."""
    found = [path.name for path in HERE.iterdir() if (path / "frames.txt").is_file()]
    return sorted(found, key=lambda name: [int(part) for part in name.split(".")])


def frames(version: str) -> list[Golden]:
    """Returns the frames of one version, in the order of its listing."""
    listed = _listing(version)
    stored = _split((HERE / version / "frames.bin").read_bytes())
    assert len(listed) == len(stored), f"{version}: listing and frames do not belong together"
    return [
        Golden(version, sender, name, message, frame)
        for (sender, name, message), frame in zip(listed, stored, strict=True)
    ]


def all_frames() -> list[Golden]:
    """Returns the frames of all versions."""
    return [frame for version in versions() for frame in frames(version)]


def spoken(version: str, sender: str) -> dict[str, Message]:
    """Returns what one side sent under a version, by name.

    What a version neither added nor changed it has of those before it.
    """
    known = versions()[: versions().index(version) + 1]
    return {f.name: f.message for each in known for f in frames(each) if f.sender == sender}


def frame_of(message: Message) -> bytes:
    """Packs a message without the product's help."""
    body: bytes = msgpack.packb(message)
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def _listing(version: str) -> list[tuple[str, str, Message]]:
    lines = (HERE / version / "frames.txt").read_text().splitlines()
    found = []
    for line in filter(None, lines):
        sender, name, literal = line.split(maxsplit=2)
        found.append((sender, name, ast.literal_eval(literal)))
    return found


def _split(data: bytes) -> list[bytes]:
    found, start = [], 0
    while start < len(data):
        end = start + HEADER_BYTES + int.from_bytes(data[start : start + HEADER_BYTES], "big")
        found.append(data[start:end])
        start = end
    return found


def main() -> None:
    """Writes the frames of a version from its listing."""
    (version,) = sys.argv[1:]
    packed = b"".join(frame_of(message) for _, _, message in _listing(version))
    (HERE / version / "frames.bin").write_bytes(packed)


if __name__ == "__main__":
    main()
