"""What snapshot backends are told by the configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from tsliced.config import Config, ConfigError, Problem, describe, load


@pytest.fixture
def main(tmp_path: Path) -> Path:
    return tmp_path / "tsliced.toml"


def load_text(main: Path, text: str) -> Config:
    main.write_text(text)
    return load(main)


def problems_of(main: Path, text: str) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        load_text(main, text)
    return caught.value.problems


def test_an_engine_is_found_by_its_jobs_name(main: Path) -> None:
    config = load_text(
        main,
        """
        [backends.endpoint]
        engines = ["a-?=vllm+http://localhost:1", "a*=sglang+https://[::1]/x/", "*=vllm+http://h"]
        """,
    )
    found = config.backends.endpoint.engine_of
    assert found("a-1") == ("vllm", "http://localhost:1", "localhost", 1)
    assert found("a-12") == ("sglang", "https://[::1]:443/x", "::1", 443)
    assert found("b") == ("vllm", "http://h:80", "h", 80)
    assert load_text(main, "").backends.endpoint.engine_of("b") is None


@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        ("[backends.endpoint]\nengines = ['a']", "endpoint.engines", "JOB=KIND+URL"),
        ("[backends.endpoint]\nengines = ['a=http://b']", "endpoint.engines", "vllm+http:"),
        ("[backends.endpoint]\nengines = ['a=tgi+http://b']", "endpoint.engines", "sglang+"),
        ("[backends.endpoint]\nengines = ['a=vllm+ftp://b']", "endpoint.engines", "a scheme"),
        ("[backends.endpoint]\nengines = ['a=vllm+http://b:x']", "endpoint.engines", "read"),
        ("[backends.endpoint]\nengines = ['a=vllm+http://b?c']", "endpoint.engines", "scheme"),
        ("[backends.endpoint]\nsleep_level = 3", "endpoint.sleep_level", "at most 2"),
        ("[backends.cli]\ncalls = 'x'", "cli.calls", "toggle, actions"),
        ("[backends.command]\nstate = ['park']", "command.state", "no absolute path"),
        ("[backends.command]\nstate = ['/p', '{who}']", "command.state", "{who} is not known"),
        ("[backends.command]\nstate = ['/p', '{timeout_s}']", "command.state", "for freeze"),
        ("[backends.command]\nfreeze = ['/p']", "command.freeze", "both, or neither"),
    ],
)
def test_a_mistake_is_named_with_its_key(main: Path, text: str, key: str, says: str) -> None:
    (problem,) = problems_of(main, text)
    assert problem.key == f"backends.{key}"
    assert says in problem.text


def test_credentials_in_an_engines_url_are_refused_and_not_repeated(main: Path) -> None:
    text = "[backends.endpoint]\nengines = ['a=vllm+http://bob:hunter2@b:1']\n"
    (problem,) = problems_of(main, text)
    assert "credentials_file" in problem.text
    assert "hunter2" not in str(problem)


def test_programs_that_are_needed_must_be_there(main: Path) -> None:
    problems = problems_of(main, '[daemon]\nbackend = "command"\n')
    assert {problem.key for problem in problems} == {
        "backends.command.snapshot",
        "backends.command.restore",
        "backends.command.state",
    }


def test_a_table_of_a_backend_from_elsewhere_is_kept_as_it_is(main: Path) -> None:
    text = '[daemon]\nbackend = "rocm"\n[backends.rocm]\ntool = "x"\nmore = {a = [1]}\n'
    config = load_text(main, text)
    assert config.backends.others == {"rocm": {"tool": "x", "more": {"a": [1]}}}
    assert config.warnings == ()
    copy = main.with_name("copy.toml")
    copy.write_text(describe(config))
    assert load(copy) == config


def test_the_ways_of_ranks_are_named_for_the_host_for_groups_and_for_jobs(main: Path) -> None:
    config = load_text(
        main,
        """
        [daemon]
        backend = "cuda"
        [groups.g1]
        devices = ["0"]
        backend = ["endpoint+cuda", "my.module:Backend"]
        [groups.g2]
        devices = ["1"]
        [jobs."exp*"]
        backend = "torch"
        """,
    )
    assert config.warnings == ()
    ways = config.ways()
    assert ways.default == (("cuda",),)
    assert ways.groups == {"g1": (("endpoint", "cuda"), ("my.module:Backend",))}
    assert ways.jobs == (("exp*", (("torch",),)),)
    copy = main.with_name("copy.toml")
    copy.write_text(describe(config))
    assert load(copy) == config


@pytest.mark.parametrize("text", ['"CUDA"', '["a+b+c"]', '["torch", "+cuda"]', "7", "[]", "[true]"])
def test_what_is_no_way_is_refused(main: Path, text: str) -> None:
    (problem,) = problems_of(main, f"[daemon]\nbackend = {text}\n")
    assert problem.key == "daemon.backend"


def test_a_table_that_no_backend_reads_is_warned_of(main: Path) -> None:
    (warning,) = load_text(main, "[backends.comand]\nx = 1\n").warnings
    assert "did you mean command?" in warning
