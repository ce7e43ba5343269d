"""examples/slurm: two batch jobs, each of which starts a Ray of its own, on the same devices."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import until
from slurm_jobs import Job, submit
from slurm_site import PYTHON, USERS, Site, write_script

STEPS = 3
LIMIT_S = 200


@pytest.fixture
def place(site: Site) -> Path:
    """Where jobs write, with the commands that an environment with Ray in it has."""
    write_script(site.root / "bin" / "ray", f'exec {PYTHON} -m ray.scripts.scripts "$@"')
    write_script(site.root / "bin" / "python", f'exec {PYTHON} "$@"')
    return site.place_for_all()


def start(site: Site, place: Path, user: str, nodes: str) -> Job:
    """Submits the example, with a driver whose workers have their state on softcuda's devices."""
    repository = site.root / "repository"
    paths = [site.environment()["PYTHONPATH"], f"{repository}/tests/e2e"]
    variables = {"RAY_ROOT": str(place), "HOME": str(place), "PYTHONPATH": ":".join(paths)}
    exported = ",".join(["ALL", *(f"{name}={value}" for name, value in variables.items())])
    batch = (f"{repository}/examples/slurm/ray.sbatch", "python")
    driver = (f"{repository}/tests/slurm/ray_job.py", f"--steps={STEPS}")
    output = (f"--export={exported}", f"--output={place}/%j.out")
    return submit(site, user, *output, *batch, *driver, nodes=nodes)


def steps_of(job: Job, place: Path) -> list[list[int]]:
    """Returns what the driver has printed: the pids of all workers, for each step."""
    text = (place / f"{job.id}.out").read_text()
    found = [line.split() for line in text.splitlines() if line.startswith("step ")]
    assert [line[1] for line in found] == [f"{n}:" for n in range(STEPS)], text
    return [[int(float(pid)) for pid in line[2:]] for line in found]


@pytest.mark.timeout(300)
def test_two_batch_jobs_with_a_ray_each_share_devices_and_leave_nothing(
    site: Site, place: Path
) -> None:
    node = site.nodes["n1"]
    since = {name: each.mark() for name, each in site.nodes.items()}
    jobs = [start(site, place, "alice", "n1,n2"), start(site, place, "bob", "n1")]
    until(site.pids_of_jobs, "they have begun")
    over = ("COMPLETED", "FAILED", "CANCELLED")
    until(lambda: all(job.state() in over for job in jobs), "both have ended", LIMIT_S)
    workers: dict[int, str] = {}
    for job, count in zip(jobs, (4, 2), strict=True):
        steps = steps_of(job, place)
        assert job.state() == "COMPLETED"
        assert len(set(steps[0])) == count, "one on each device"
        assert steps == STEPS * [steps[0]], "all steps are of the same processes"
        workers |= dict.fromkeys(steps[0], f"lab/{USERS[job.user]}/{job.id}")
    # Children of the raylets, which told nobody anything: Slurm's cgroups say whose they are.
    moved: dict[int, str] = {}
    for name, each in site.nodes.items():
        for event in each.events("operation", since=since[name]):
            _, _, pid = event["rank"].partition(":")
            moved[int(pid)] = event["job"]
    assert moved == workers
    turns = [e["job"] for e in node.events("granted", since=since["n1"]) if e["switch_s"] > 0]
    assert set(turns) == set(workers.values()), "each was brought back to where the other had been"
    assert {file.name for file in place.iterdir()} == {f"{job.id}.out" for job in jobs}, "no Ray's"
    until(lambda: not site.pids_of_jobs(), "no process is left")
