"""What a person may call a job."""

from __future__ import annotations

import pytest

from tsliced.core.model import JobKey


@pytest.mark.parametrize("name", ["exp7", "1000/exp7", "main/1000/exp7"])
def test_a_job_is_meant_by_its_id_with_or_without_user_and_cluster(name: str) -> None:
    assert JobKey("main", 1000, "exp7").is_called(name)
    assert not JobKey("main", 1001, "exp8").is_called(name)
