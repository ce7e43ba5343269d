"""The frames of each version: what they hold never changes, and today's parser understands them."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from typing import Any

import pytest
from golden import HERE, Golden, all_frames, frame_of, frames, versions

from libtimeslice.protocol import (
    PROTOCOL_VERSION,
    ErrorCode,
    FrameReader,
    Reply,
    encode,
    parse_untrusted,
)
from libtimeslice.protocol.parsing import PARSERS

#: SHA-256 of the frames of versions that a release has spoken. If this fails for one of them, put
#: the frames back: what old programs send does not change.
RELEASED = {"1.0": "bcbe085a5a8e41fce9e84065bc3a45895b4e92afc6156fad69b616305ace42bf"}

FROM_CLIENTS = [frame for frame in all_frames() if frame.sender == "client"]


def test_the_frames_of_a_released_version_are_those_that_were_kept() -> None:
    digests = {
        version: hashlib.sha256((HERE / version / "frames.bin").read_bytes()).hexdigest()
        for version in RELEASED
    }
    assert digests == RELEASED


def test_each_version_that_is_spoken_has_its_frames() -> None:
    major, minor = PROTOCOL_VERSION
    assert versions() == [f"{major}.{each}" for each in range(minor + 1)]


@pytest.mark.parametrize("version", versions())
def test_the_listing_says_what_is_in_the_frames(version: str) -> None:
    stream = (HERE / version / "frames.bin").read_bytes()
    assert FrameReader().feed(stream) == [frame.message for frame in frames(version)]
    names = [(frame.sender, frame.name) for frame in frames(version)]
    assert len(set(names)) == len(names), "a name is used twice"


@pytest.mark.parametrize("frame", FROM_CLIENTS, ids=str)
def test_what_a_client_sent_is_understood_in_every_field(frame: Golden) -> None:
    (message,) = FrameReader().feed(frame.frame)
    request = parse_untrusted(message)
    if isinstance(request, Reply):
        assert (request.re, request.error) == (message["re"], message.get("err"))
        assert request.fields == message
        return
    known = {field.name for field in fields(request)}
    asked = {name: as_parsed(value) for name, value in message.items() if name != "t"}
    # All of them: a field that today's daemon ignores is a promise that it no longer keeps.
    assert asked == {name: getattr(request, name) for name in asked.keys() & known}


def as_parsed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@pytest.mark.parametrize("frame", all_frames(), ids=str)
def test_what_is_sent_today_has_the_form_of_what_was_sent(frame: Golden) -> None:
    assert encode(frame.message) == frame.frame == frame_of(frame.message)


def test_every_message_that_a_client_may_send_is_kept() -> None:
    kept = {frame.message.get("t") for frame in FROM_CLIENTS}
    assert set(PARSERS) <= kept, "add what is missing to the version that brings it"


def test_the_codes_of_all_kept_errors_are_known_still() -> None:
    errors = [
        frame.message.get("err") or frame.message
        for frame in all_frames()
        if "err" in frame.message or frame.message.get("t") == "error"
    ]
    assert errors
    assert {error["code"] for error in errors} <= {str(code) for code in ErrorCode}
