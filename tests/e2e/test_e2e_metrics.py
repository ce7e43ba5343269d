"""Metrics of a daemon that works: scraped by hand, by promtool and by Prometheus itself."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from harness import LIMIT_S, Host, Settings, own, until, with_qualifying
from harness import REPOSITORY as ROOT
from raw_client import RawClient

from tsliced.observe.accounts import Accounts

PROMTOOL, PROMETHEUS = shutil.which("promtool"), shutil.which("prometheus")
NEEDS_PROMETHEUS = pytest.mark.skipif(
    PROMTOOL is None or PROMETHEUS is None, reason="needs the Debian package prometheus"
)
#: A line of a page: name, labels and value.
SAMPLE = re.compile(r"([a-z_]+)(?:\{(.*)\})? (\S+)")
MIB = 1 << 20
MONITORING = ROOT / "docs/monitoring"

Page = dict[tuple[str, frozenset[tuple[str, str]]], float]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def host(softcuda_build: Path, address: str) -> Iterator[Host]:
    """A host on which two jobs took turns, and told of themselves."""
    settings: Settings = {"metrics": {"listen": address}, "history": {"sample_s": 1.0}}
    host = Host(softcuda_build, settings=with_qualifying(settings))
    host.start_daemon()
    one, two = host.trainer("one", mib=8), host.trainer("two", mib=8)
    for _ in range(3):
        for rank in (one, two):
            rank.do("acquire", groups="g1", phase="rollout")
            end = time.monotonic() + 0.15
            until(lambda end=end: time.monotonic() > end, "it was held for long enough")  # type: ignore[misc]
            rank.do("release")
    with RawClient(host.socket) as told:
        told.hello(job="told")
        for step in (10, 11):
            figures = {"step": step, "tokens": 100, "reward": 0.5, "loss": float("nan"), "kl": 2}
            told.send({"t": "progress", "fields": {**figures, "note": 'odd "text"\\'}})
        told.send({"t": "queue", "name": "trajectories", "depth": 7, "target": 10})
        told.ask("ping")
        yield host
    host.close()


def scrape(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=LIMIT_S) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        page: bytes = answer.read()
        return page.decode()


def parsed(text: str) -> Page:
    page: Page = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        match = SAMPLE.fullmatch(line)
        assert match is not None, line
        labels = re.findall(r'([a-z_]+)="((?:[^"\\]|\\.)*)"', match[2] or "")
        page[match[1], frozenset(labels)] = float(match[3])
    return page


def value(page: Page, name: str, **labels: str) -> float:
    return page[f"tsliced_{name}", frozenset(labels.items())]


def test_figures_of_metrics_and_history_agree_to_one_per_cent(host: Host, address: str) -> None:
    page = parsed(scrape(address))
    started = value(page, "start_time_seconds")
    accounts = Accounts(since_unix=started).add_all(host.events())
    group, now = accounts.groups["g1"], time.time()
    about = pytest.approx
    assert group.rounds >= 8
    assert group.switches >= 5
    assert value(page, "leases_granted_total", group="g1") == group.leases
    assert value(page, "rounds_granted_total", group="g1", path="switch") == group.switches
    for name, ours in (
        ("group_useful_seconds_total", accounts.useful_s("g1", now)),
        ("group_switch_seconds_total", group.switch_s),
        ("group_held_seconds_total", accounts.held_s("g1", now)),
        ("lease_wait_seconds_sum", group.waits.total),
        ("hold_seconds_sum", group.holds.total),
    ):
        assert ours > 0, name
        assert value(page, name, group="g1") == about(ours, rel=0.01), name
    for verb in ("freeze", "snapshot", "restore", "thaw"):
        step = accounts.steps[verb]
        assert step.seconds.count >= 5, verb
        assert value(page, "step_seconds_count", step=verb) == step.seconds.count
        assert value(page, "step_seconds_sum", step=verb) == about(step.seconds.total, rel=0.01)
    for verb in ("snapshot", "restore"):
        assert accounts.steps[verb].bytes >= 5 * 8 * MIB
        assert value(page, "step_bytes_total", step=verb) == accounts.steps[verb].bytes
    moves = accounts.moves["evicted"].seconds
    assert value(page, "move_seconds_sum", result="evicted") == about(moves.total, rel=0.01)


def test_figures_of_a_report_and_metrics_agree_to_one_per_cent(host: Host, address: str) -> None:
    page = parsed(scrape(address))
    done = subprocess.run(
        [sys.executable, "-m", "tsliced.ctl", "report", "--json"],
        env=host.variables(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found = json.loads(done.stdout)["figures"]
    (group,) = [each for each in found["groups"] if each["name"] == "g1"]
    span_s, about = found["end_unix"] - found["begin_unix"], pytest.approx
    for share, name in (("held", "group_held"), ("useful", "group_useful")):
        seconds = value(page, f"{name}_seconds_total", group="g1")
        assert group["duty"][share] * span_s == about(seconds, rel=0.01), name
    jobs = {job["job"]: job for job in found["jobs"]}
    for name in map(own, ("one", "two")):
        useful = value(page, "job_useful_seconds_total", job=name)
        assert jobs[name]["useful_s"] == about(useful, rel=0.01)
    moved = sum(value(page, "step_bytes_total", step=step) for step in ("snapshot", "restore"))
    assert sum(job["moved_bytes"] for job in found["jobs"]) == moved


def test_the_page_says_what_stands_now(host: Host, address: str) -> None:
    waiter = host.rank("waiter")
    holder = host.rank("holder")
    holder.do("acquire", groups="g2")
    pending = waiter.start("acquire", groups="g2")
    until(lambda: host.group("g2")["waiters"] == 1, "it waits")
    page = parsed(scrape(address))
    assert value(page, "group_held", group="g2") == 1
    assert value(page, "group_waiters", group="g2") == 1
    assert value(page, "group_oldest_wait_seconds", group="g2") > 0
    assert value(page, "group_waiters", group="g1") == 0
    assert value(page, "parked_bytes") >= 8 * MIB
    assert value(page, "parked_peak_bytes") >= value(page, "parked_bytes")
    assert value(page, "ranks", state="parked") == 1
    assert value(page, "snapshot_headroom_bytes") > 0
    assert value(page, "device_memory_bytes", device="0") > 0
    assert value(page, "device_observed_seconds_total", device="0") > 0
    held = value(page, "group_held_seconds_total", group="g2")
    later = parsed(scrape(address))
    assert value(later, "group_held_seconds_total", group="g2") >= held > 0
    holder.do("release")
    pending.wait()
    waiter.do("release")


def test_what_jobs_tell_is_shown_until_they_are_over(host: Host, address: str) -> None:
    page = parsed(scrape(address))
    job = own("told")
    assert value(page, "job_step", job=job) == 11
    assert value(page, "job_reward", job=job) == 0.5
    assert value(page, "job_figure", job=job, figure="kl") == 2
    assert ("tsliced_job_figure", frozenset({("job", job), ("figure", "note")})) not in page
    loss = value(page, "job_loss", job=job)
    assert loss != loss, "a loss that is no number is shown as such"
    assert value(page, "job_queue_depth", job=job, queue="trajectories") == 7
    with RawClient(host.socket) as over:
        over.hello(job="over")
        over.send({"t": "progress", "fields": {"step": 1}})
        until(lambda: own("over") in scrape(address), "it is shown")
        over.send({"t": "bye"})
        until(lambda: own("over") not in scrape(address), "it is gone")


def test_no_histogram_is_by_job_or_process_and_all_names_are_ours(address: str, host: Host) -> None:
    page = parsed(scrape(address))
    for name, labels in page:
        assert name.startswith(("tsliced_", "process_")), name
        kinds = {key for key, _ in labels}
        if "le" in kinds:
            assert not kinds & {"job", "pid", "rank"}, name


@NEEDS_PROMETHEUS
def test_promtool_finds_nothing_to_complain_of(host: Host, address: str) -> None:
    assert PROMTOOL is not None
    run = subprocess.run(
        [PROMTOOL, "check", "metrics"],
        input=scrape(address),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


# --- what is made of them: rules, dashboard -------------------------------------------------------


def dashboard_queries() -> list[str]:
    """Returns the queries of the dashboard, with something for its variables."""
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    targets = [t for panel in dashboard["panels"] for t in panel.get("targets", ())]
    for name, text in (
        ("$__rate_interval", "1m"),
        ("$instance", ".*"),
        ("$group", ".*"),
    ):
        for target in targets:
            target["expr"] = target["expr"].replace(name, text)
    return [target["expr"] for target in targets]


def alert_queries() -> list[str]:
    text = (MONITORING / "alerts.yml").read_text()
    return re.findall(r"^ +expr: (.*)$", text, re.MULTILINE)


def test_rules_and_dashboard_ask_for_nothing_that_is_not_there(host: Host, address: str) -> None:
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", scrape(address), re.MULTILINE))
    there = set(kinds)
    for name, kind in kinds.items():
        if kind == "histogram":
            there |= {f"{name}_{end}" for end in ("bucket", "sum", "count")}
    queries = dashboard_queries() + alert_queries()
    assert len(queries) > 40
    asked = {name for query in queries for name in re.findall(r"\b(?:tsliced|process)_\w+", query)}
    assert asked - there == set()
    page = (ROOT / "docs/monitoring.md").read_text()
    assert [name for name in sorted(kinds) if name.startswith("tsliced") and name not in page] == []


@NEEDS_PROMETHEUS
def test_promtool_finds_nothing_wrong_with_the_alert_rules() -> None:
    assert PROMTOOL is not None
    command = [PROMTOOL, "check", "rules", str(MONITORING / "alerts.yml")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert "SUCCESS" in run.stdout


class Prometheus:
    """A Prometheus that scrapes one address every second, by its HTTP API."""

    def __init__(self, directory: Path, address: str) -> None:
        config = directory / "prometheus.yml"
        config.write_text(
            "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
            f"rule_files: [{MONITORING / 'alerts.yml'}]\n"
            "scrape_configs:\n"
            "  - job_name: tsliced\n"
            f"    static_configs: [{{targets: ['{address}']}}]\n"
        )
        self.url = f"http://127.0.0.1:{free_port()}"
        assert PROMETHEUS is not None
        log = (directory / "log").open("w")
        self.process = subprocess.Popen(
            [
                PROMETHEUS,
                f"--config.file={config}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address={self.url.removeprefix('http://')}",
            ],
            stdout=log,
            stderr=log,
        )
        log.close()

    def __enter__(self) -> Prometheus:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(LIMIT_S)

    def get(self, path: str, **fields: str) -> Any:
        """Returns the data of an answer. Raises OSError as long as nobody answers."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(fields)}"
        with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        return found["data"]

    def query(self, text: str) -> list[tuple[dict[str, str], float]]:
        result = self.get("query", query=text)["result"]
        return [(series["metric"], float(series["value"][1])) for series in result]

    def has_scraped(self) -> bool:
        assert self.process.poll() is None, "prometheus ended"
        with suppress(OSError):
            # Two scrapes, for rates.
            counted = self.query('count_over_time(up{job="tsliced"}[1m])')
            return bool(counted) and counted[0][1] >= 2
        return False


@NEEDS_PROMETHEUS
def test_prometheus_scrapes_it_and_understands_every_query_and_rule(
    host: Host, address: str, tmp_path: Path
) -> None:
    with Prometheus(tmp_path, address) as prometheus:
        until(prometheus.has_scraped, "it has scraped", limit_s=60.0)
        assert [up for _, up in prometheus.query("up")] == [1.0]
        (useful,) = prometheus.query('tsliced_group_useful_seconds_total{group="g1"}')
        page = parsed(scrape(address))
        ours = value(page, "group_useful_seconds_total", group="g1")
        assert useful[1] == pytest.approx(ours, rel=0.01)
        for query in dashboard_queries():
            prometheus.query(query)
        # That of a device has the group of the device, though only another metric says it.
        kernel = [query for query in dashboard_queries() if "group_left" in query]
        assert {series["group"] for series, _ in prometheus.query(kernel[0])} == {"g1", "g2"}

        def rules() -> list[dict[str, Any]]:
            groups = prometheus.get("rules")["groups"]
            found = [rule for group in groups for rule in group["rules"]]
            return found if all(rule["health"] != "unknown" for rule in found) else []

        found = until(rules, "all rules are evaluated")
        assert len(found) == len(alert_queries())
        assert {rule["health"] for rule in found} == {"ok"}
        assert [rule["name"] for rule in found if rule["state"] != "inactive"] == []
