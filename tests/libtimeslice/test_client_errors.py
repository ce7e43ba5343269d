"""The exception tree: codes, facts, and crossing between processes."""

from __future__ import annotations

import pickle

import pytest

from libtimeslice import errors
from libtimeslice.protocol import ErrorCode


@pytest.mark.parametrize("code", [str(code) for code in ErrorCode])
def test_each_code_of_the_wire_becomes_an_error_with_that_code_and_its_facts(code: str) -> None:
    error = errors.error_from({"code": code, "message": "why", "group": "n1", "self": 1})
    assert isinstance(error, errors.TimeSliceError)
    assert error.code == code
    assert error.facts == {"group": "n1"}
    assert str(error) == f"why [{code} group='n1']"
    assert (type(error) is errors.TimeSliceError) == (code == "internal")


def test_a_code_from_the_future_and_a_malformed_error_are_still_errors_of_the_library() -> None:
    assert errors.error_from({"code": "tired", "message": "m"}).code == "tired"
    assert isinstance(errors.error_from(["?"]), errors.ProtocolError)
    assert errors.error_from({}).code == "internal"


def test_errors_survive_pickling_with_code_and_facts() -> None:
    error = errors.error_from({"code": "pinned", "message": "m", "reason": "ipc"})
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is errors.Refused
    assert (copy.code, copy.facts, str(copy)) == ("pinned", {"reason": "ipc"}, str(error))


def test_an_unreachable_daemon_is_an_unavailable_one() -> None:
    assert issubclass(errors.DaemonUnreachable, errors.Unavailable)
    assert errors.DaemonUnreachable("m").code == "unavailable"
