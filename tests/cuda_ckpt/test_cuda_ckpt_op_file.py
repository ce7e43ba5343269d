"""``cuda_ckpt.op_file``: what a worker leaves behind for whoever comes after a crash."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cuda_ckpt.op_file import OpFile, OpFileError, OpRecord, ProcessIdentity, read_op_file

TARGET, WORKER = ProcessIdentity(4242, 100), ProcessIdentity(77, 200)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "op.json"


def test_before_the_first_operation_there_is_no_record(path: Path) -> None:
    OpFile(str(path), TARGET, WORKER)
    assert read_op_file(str(path)) is None


def test_a_begun_operation_is_read_without_a_result(path: Path) -> None:
    OpFile(str(path), TARGET, WORKER).begin("op-1", "checkpoint")
    record = read_op_file(str(path))
    assert record is not None
    assert record == OpRecord("op-1", "checkpoint", TARGET, WORKER, record.started, None)


def test_an_ended_operation_is_read_with_its_result(path: Path) -> None:
    file = OpFile(str(path), TARGET, WORKER)
    file.begin("op-1", "checkpoint")
    file.end({"op_id": "op-1", "ok": True, "state": "checkpointed"})
    record = read_op_file(str(path))
    assert record is not None
    assert record.result == {"ok": True, "state": "checkpointed"}


def test_the_next_operation_clears_the_result_of_the_last(path: Path) -> None:
    file = OpFile(str(path), TARGET, WORKER)
    file.begin("op-1", "lock")
    file.end({"op_id": "op-1", "ok": True})
    file.begin("op-2", "checkpoint")
    record = read_op_file(str(path))
    assert record is not None
    assert (record.op_id, record.op, record.result) == ("op-2", "checkpoint", None)


def test_only_the_owner_can_read_the_file_and_nothing_else_is_left(path: Path) -> None:
    OpFile(str(path), TARGET, WORKER).begin("op-1", "lock")
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_an_error_with_advice(path: Path) -> None:
    path.with_suffix(".json.tmp").mkdir()
    with pytest.raises(OpFileError, match="cannot write the op file") as caught:
        OpFile(str(path), TARGET, WORKER).begin("op-1", "lock")
    assert "Make room" in caught.value.advice


def test_a_symbolic_link_in_the_way_is_not_followed(path: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "op.json.tmp").symlink_to(victim)
    with pytest.raises(OpFileError):
        OpFile(str(path), TARGET, WORKER).begin("op-1", "lock")
    assert victim.read_text() == "precious"


GOOD: dict[str, object] = {
    "op_id": "op-1",
    "op": "lock",
    "target": {"pid": 1, "start_time": 2},
    "worker": {"pid": 3, "start_time": 4},
    "started": 5.0,
    "result": None,
}


def test_the_documented_content_is_read(path: Path) -> None:
    path.write_text(json.dumps(GOOD))
    assert read_op_file(str(path)) == OpRecord(
        "op-1", "lock", ProcessIdentity(1, 2), ProcessIdentity(3, 4), 5.0, None
    )


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        *(json.dumps({k: v for k, v in GOOD.items() if k != key}).encode() for key in GOOD),
        *(json.dumps(GOOD | {key: [1]}).encode() for key in GOOD),
        json.dumps(GOOD | {"target": {"pid": "1", "start_time": 2}}).encode(),
    ],
)
def test_content_that_no_worker_wrote_is_an_error_that_names_the_file(
    path: Path, content: bytes
) -> None:
    path.write_bytes(content)
    with pytest.raises(OpFileError, match=r"op\.json is not an op file"):
        read_op_file(str(path))
