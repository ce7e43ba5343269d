"""Files that stay open between reads: what they hold is read anew, and what is gone is gone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tsliced.host.procfs import HeldFiles

#: Where cgroups can be made: version 1, version 2.
_CGROUPS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))


def _descriptors_to(path: Path) -> int:
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return sum(os.path.islink(link) and os.readlink(link) == str(path) for link in links)


def test_what_a_file_holds_is_read_anew_each_time(tmp_path: Path) -> None:
    files, path = HeldFiles(), tmp_path / "limit"
    assert files.read(str(path)) is None
    for text in (b"max\n", b"12345\n", b"1\n"):
        path.write_bytes(text)
        assert files.read(str(path)) == text
    assert _descriptors_to(path) == 1


def test_no_more_files_stay_open_than_there_may(tmp_path: Path) -> None:
    files = HeldFiles(limit=2)
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.write_text(path.name)
        assert files.read(str(path)) == path.name.encode()
    assert [_descriptors_to(path) for path in paths] == [0, 1, 1]
    assert files.read(str(paths[0])) == b"a"
    del files
    assert [_descriptors_to(path) for path in paths] == [0, 0, 0]


def test_a_file_that_may_not_be_read_is_not_taken_for_one_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        HeldFiles().read(str(tmp_path))


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_a_cgroup_that_is_gone_is_not_taken_for_the_next_one_of_its_name() -> None:
    point = next((point for point in _CGROUPS if os.access(point, os.W_OK)), None)
    if point is None:
        pytest.skip("no cgroup can be made here")
    cgroup = point / f"tsliced-held-{os.getpid()}"
    path, files = cgroup / "cgroup.procs", HeldFiles()
    cgroup.mkdir()
    try:
        assert files.read(str(path)) == b""
        cgroup.rmdir()
        assert files.read(str(path)) is None
        cgroup.mkdir()
        assert files.read(str(path)) == b""
        assert _descriptors_to(path) == 1
    finally:
        cgroup.rmdir()
