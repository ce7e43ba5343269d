"""What a reload can change, and what has to wait for a restart."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

from tsliced.config import Config, load
from tsliced.config.changes import changed_keys, without_restart
from tsliced.config.settings import CORE_RULES

SAMPLE = Path(__file__).parents[2] / "systemd" / "tsliced.toml"


def read(path: Path, text: str) -> Config:
    path.write_text(text)
    return replace(load(path), files=())


def test_what_backends_are_told_needs_a_restart(tmp_path: Path) -> None:
    old = read(tmp_path / "t", "")
    new = read(tmp_path / "t", '[backends.cli]\ncalls = "actions"\n')
    assert changed_keys(old, new) == ("backends",)
    assert without_restart(old, new) == (old, ("backends",))


def test_what_needs_a_restart_stays_and_is_named_and_the_rest_is_new(tmp_path: Path) -> None:
    path = tmp_path / "t"
    old = read(path, '[daemon]\nhost = "n1"\n')
    new = read(
        path,
        """
        [daemon]
        host = "n2"
        log_level = "debug"
        [limits]
        block = 64
        grace_s = 3.0
        backlog = 12
        barrier_timeout_s = 900.0
        [scan]
        interval_s = 0.5
        nvml_timeout_s = 7.0
        [groups.a]
        devices = ["0"]
        """,
    )
    taken, waiting = without_restart(old, new)
    assert sorted(waiting) == [
        "daemon.host",
        "limits.backlog",
        "limits.block",
        "scan.nvml_timeout_s",
    ]
    assert set(changed_keys(old, taken)) == {
        "daemon.log_level",
        "limits.barrier_timeout_s",
        "limits.grace_s",
        "scan.interval_s",
        "groups.a",
    }
    assert taken.limits.core.grace_s == 3.0
    assert taken.daemon.host == "n1"
    assert changed_keys(taken, taken) == ()
    assert without_restart(old, old) == (old, ())


def test_other_backends_of_groups_and_jobs_wait_for_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "t"
    text = '[groups.a]\ndevices = ["0"]\nbackend = "cuda"\n[jobs.x]\nbackend = ["{}"]\n'
    old = read(path, text.format("cli"))
    new = read(path, text.format("torch").replace('"cuda"', '"cli"\nmax_hold_s = 60'))
    taken, waiting = without_restart(old, new)
    assert waiting == ("jobs", "groups.a.backend")
    assert changed_keys(old, taken) == ("groups.a",)
    assert taken.groups[0].max_hold_s == 60
    assert str(taken.ways()) == str(old.ways()) != str(new.ways())


def test_the_sample_says_of_each_key_whether_it_needs_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "t"
    old = read(path, "")
    section = ""
    for line in SAMPLE.read_text().splitlines():
        if match := re.fullmatch(r"#?\[(.+)\]", line):
            section = match[1]
        match = re.fullmatch(r"#([a-z_]+) = (.+?)(  # \(restart\))?", line)
        if match is None or not hasattr(old, section):
            continue
        key, value = match[1], match[2]
        new = read(path, f"[{section}]\n{key} = {other(old, section, key, value)}\n")
        taken, waiting = without_restart(old, new)
        assert bool(match[3]) == (f"{section}.{key}" in waiting), line
        assert bool(match[3]) != (f"{section}.{key}" in changed_keys(old, taken)), line


#: Values that differ from the default where neither a number a little less nor a path would do.
OTHERS = {
    "backend": '"other"',
    "host": '"other"',
    "hosts": '["other"]\nauth = "tls"',
    "listen": '"other"\nauth = "tls"',
    "metrics.listen": '"other:1"',
    "cluster": '"other"',
    "visible_devices": '"5"',
    "barrier_timeout_s": "1e6",
    "max_frame_bytes": "4096",
    "device_margin_bytes": "1",
}


def choices_of(config: Config, section: str, key: str) -> tuple[str, ...]:
    """Return what a key may be set to, if that is a list of words."""
    settings = getattr(config, section)
    parts = (settings, getattr(settings, "server", None))
    for part in filter(None, parts):
        for item in fields(part):
            if item.name == key and "rule" in item.metadata:
                return tuple(item.metadata["rule"].choices)
    return CORE_RULES[key].choices if key in CORE_RULES else ()


def other(config: Config, section: str, key: str, value: str) -> str:
    """Return another value that the key may have."""
    if f"{section}.{key}" in OTHERS or key in OTHERS:
        return OTHERS.get(f"{section}.{key}") or OTHERS[key]
    if choices := choices_of(config, section, key):
        return next(f'"{choice}"' for choice in choices if f'"{choice}"' != value)
    if value in ("true", "false"):
        return "false" if value == "true" else "true"
    if re.fullmatch(r"[0-9.]+", value):
        if float(value) == 0:
            return value.replace("0", "1", 1)
        return f"{float(value) * 0.9}" if "." in value else f"{int(value) * 9 // 10}"
    if re.fullmatch(r'"[0-9.]+ [KMGT]iB"', value):
        return "12345678"
    return '"/other"'
