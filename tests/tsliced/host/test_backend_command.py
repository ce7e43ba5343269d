"""The backend for configured programs, and how any program is run to its end."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from backend_lab import reason_of

from tsliced.config.backends import BackendSettings, CommandSettings
from tsliced.core.model import Cause, HostName, JobKey, ProcessId, RankId, RankState
from tsliced.host.backends import programs
from tsliced.host.backends.base import BackendContext, BackendError
from tsliced.host.backends.command import CommandBackend
from tsliced.host.backends.programs import ProgramError, Programs
from tsliced.host.processes import identify

LIMIT_S = 30.0

#: Keeps a state for each pid, and does what a file tells it to do wrong.
TOOL = """#!/bin/sh
place=$(dirname "$0"); file=$place/state-$2; [ -f $file ] || echo running > $file
echo "$@" >> $place/calls
[ -f $place/wrong-$1 ] && . $place/wrong-$1
case $1 in
state) cat $file ;;
freeze|restore) echo frozen > $file ;;
out) echo parked > $file ;;
thaw) echo running > $file ;;
esac
"""


class Tool:
    """A program in a directory of its own, and the configuration that names it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.path = place / "tool"
        self.path.write_text(TOOL)
        self.path.chmod(0o755)
        self.files = place / "files"
        self.files.mkdir()

    def settings(self, *, freezes: bool = True, limit_s: float | None = None) -> CommandSettings:
        def call(name: str, *more: str) -> tuple[str, ...]:
            return (str(self.path), name, "{pid}", *more)

        return CommandSettings(
            freeze=call("freeze", "{job}", "{uid}", "--within={timeout_s}") if freezes else (),
            snapshot=call("out"),
            restore=call("restore"),
            thaw=call("thaw") if freezes else (),
            state=call("state"),
            state_timeout_s=LIMIT_S,
            command_timeout_s=limit_s,
        )

    def goes_wrong(self, name: str, script: str) -> None:
        """Let one of its calls run a line of shell first."""
        (self.place / f"wrong-{name}").write_text(script + "\n")

    def calls(self, name: str) -> list[str]:
        """Return what it was called with, without its questions."""
        lines = (self.place / "calls").read_text().splitlines()
        return [line for line in lines if line.split()[0] == name]

    def tell(
        self,
        story: Callable[[CommandBackend], Awaitable[None]],
        settings: CommandSettings | None = None,
    ) -> None:
        """Run a story on a backend."""

        async def run() -> None:
            chosen = BackendSettings(command=settings or self.settings())
            backend = CommandBackend(BackendContext(directory=self.files, settings=chosen))
            await backend.start()
            async with asyncio.timeout(LIMIT_S):
                await story(backend)
            await backend.close()

        asyncio.run(run())


@pytest.fixture
def tool(tmp_path: Path) -> Tool:
    return Tool(tmp_path)


@pytest.fixture
def rank() -> Iterator[RankId]:
    with subprocess.Popen(["sleep", "100"]) as process:
        found = identify(process.pid)
        assert found is not None
        yield RankId(HostName("n1"), found)
        process.kill()


def test_each_operation_runs_its_program_and_state_has_the_last_word(
    tool: Tool, rank: RankId
) -> None:
    async def story(backend: CommandBackend) -> None:
        backend.belongs(rank.process, JobKey("", 1042, "exp 7"))
        assert await backend.probe(rank.process)
        assert (await backend.state(rank)).observed is RankState.RUNNING
        assert (await backend.freeze(rank, timeout_s=2.5)).observed is RankState.FROZEN
        assert (await backend.snapshot(rank)).observed is RankState.PARKED
        assert (await backend.restore(rank)).observed is RankState.FROZEN
        assert (await backend.thaw(rank)).observed is RankState.RUNNING

    tool.tell(story)
    # A blank in a name makes no two words of it.
    assert tool.calls("freeze") == [f"freeze {rank.process.pid} exp 7 1042 --within=2.5"]


def test_without_a_program_that_freezes_it_is_called_frozen(tool: Tool, rank: RankId) -> None:
    async def story(backend: CommandBackend) -> None:
        tool.goes_wrong("restore", "echo running > $file; exit 0")
        assert (await backend.freeze(rank, timeout_s=1)).observed is RankState.FROZEN
        assert (await backend.state(rank)).observed is RankState.FROZEN
        assert (await backend.snapshot(rank)).observed is RankState.PARKED
        assert (await backend.restore(rank)).observed is RankState.FROZEN
        assert (await backend.thaw(rank)).observed is RankState.RUNNING
        assert tool.calls("freeze") == tool.calls("thaw") == []

    tool.tell(story, tool.settings(freezes=False))


@pytest.mark.parametrize(
    ("script", "cause", "says"),
    [
        ("echo no such device >&2; exit 69", Cause.UNSUPPORTED, "status 69; no such device"),
        ("echo busy; exit 75", Cause.FREEZE_TIMEOUT, "status 75; busy"),
        ("exit 77", Cause.NOT_PERMITTED, "status 77"),
        ("kill -9 $$", Cause.DRIVER, "status -9"),
        ("exit 0", Cause.DRIVER, "says that it is done, and state that it is running"),
    ],
)
def test_what_goes_wrong_has_a_cause_and_the_state_is_asked_for(
    tool: Tool, rank: RankId, script: str, cause: Cause, says: str
) -> None:
    async def story(backend: CommandBackend) -> None:
        tool.goes_wrong("freeze", script)
        outcome = await backend.freeze(rank, timeout_s=1)
        assert outcome.observed is RankState.RUNNING
        assert reason_of(outcome)[0] is cause
        assert says in reason_of(outcome)[1]

    tool.tell(story)


@pytest.mark.parametrize("name", ["freeze", "out"])
def test_a_program_over_its_limit_is_ended_with_what_it_started(
    tool: Tool, rank: RankId, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tsliced.host.backends.command.FREEZE_GRACE_S", 0.1)
    monkeypatch.setattr(programs, "END_GRACE_S", 0.2)

    async def story(backend: CommandBackend) -> None:
        # It does not care for SIGTERM.
        tool.goes_wrong(name, f"trap '' TERM; sleep 77 & echo $! > {tool.place}/child; wait; wait")
        if name == "freeze":
            outcome = await backend.freeze(rank, timeout_s=0.3)
        else:
            outcome = await backend.snapshot(rank)
        assert outcome.observed is RankState.RUNNING
        cause, text = reason_of(outcome)
        assert cause is (Cause.FREEZE_TIMEOUT if name == "freeze" else Cause.DRIVER)
        assert "ended after its time-out" in text
        child = int((tool.place / "child").read_text())
        await gone(child)

    tool.tell(story, tool.settings(limit_s=0.4))


async def gone(pid: int) -> None:
    while identify(pid) is not None:  # noqa: ASYNC110 - it is nobody's child here
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo lost; exit 0", "it says 'lost'"),
        ("exit 3", "status 3"),
        ("yes x | head -c 100000; exit 0", "it says 'x x"),
    ],
)
def test_a_state_that_is_none_is_unknown(tool: Tool, rank: RankId, script: str, says: str) -> None:
    async def story(backend: CommandBackend) -> None:
        tool.goes_wrong("state", script)
        outcome = await backend.state(rank)
        assert outcome.observed is RankState.UNKNOWN
        assert says in reason_of(outcome)[1]
        assert len(reason_of(outcome)[1]) < 5000
        with pytest.raises(BackendError, match="its state is not known"):
            await backend.probe(rank.process)

    tool.tell(story)


def test_a_process_that_the_program_knows_nothing_of_is_none_to_be_moved(
    tool: Tool, rank: RankId
) -> None:
    async def story(backend: CommandBackend) -> None:
        tool.goes_wrong("state", "exit 69")
        assert not await backend.probe(rank.process)

    tool.tell(story)


def test_a_program_that_is_not_there_is_named(tool: Tool, rank: RankId) -> None:
    async def story(backend: CommandBackend) -> None:
        os.unlink(tool.path)
        with pytest.raises(BackendError, match="tool cannot be run: No such file"):
            await backend.probe(rank.process)
        for outcome in (await backend.snapshot(rank), await backend.state(rank)):
            assert outcome.observed is RankState.UNKNOWN
            assert "cannot be run" in reason_of(outcome)[1]

    tool.tell(story)


def test_two_calls_on_one_process_never_meet_and_those_on_others_do(tool: Tool) -> None:
    order = tool.place / "order"
    script = f"echo begin $1 >> {order}; sleep 0.2; echo end $1 >> {order}"
    command = ["/bin/sh", "-c", script, "sh"]
    first, second = ProcessId(1, 1), ProcessId(1, 2)

    async def run() -> None:
        programs = Programs(tool.files, "test")
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*(programs.run(first, [*command, who]) for who in "ab"))
            lines = order.read_text().split("\n")
            assert [line.split()[0] for line in lines if line] == ["begin", "end"] * 2
            order.unlink()
            await asyncio.gather(*(programs.run(p, [*command, "x"]) for p in (first, second)))
            assert order.read_text().split() == ["begin", "x"] * 2 + ["end", "x"] * 2

    asyncio.run(run())


def test_what_a_program_leaves_in_the_background_is_not_waited_for(
    tool: Tool, rank: RankId
) -> None:
    async def run() -> None:
        programs = Programs(tool.files, "test")
        started = time.monotonic()
        command = ["/bin/sh", "-c", "sleep 50 & echo $! >&2"]
        left = [await programs.run(rank.process, command) for _ in range(2)]
        assert time.monotonic() - started < 25
        for ended in left:
            os.kill(int(ended.complained), 9)

    asyncio.run(run())


def test_a_program_is_started_without_what_is_the_daemons_own(
    tool: Tool, rank: RankId, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere")
    monkeypatch.setenv("KEPT", "yes")

    async def run() -> None:
        said = (await Programs(tool.files, "test").run(rank.process, ["/usr/bin/env"])).said
        assert "KEPT=yes" in said
        assert "CUDA_VISIBLE" not in said
        assert "NOTIFY_SOCKET" not in said

    asyncio.run(run())


def test_a_program_that_waits_for_a_dead_process_is_ended(
    tool: Tool, rank: RankId, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "DEAD_TARGET_LIMIT_S", 0.05)

    async def story(backend: CommandBackend) -> None:
        tool.goes_wrong("out", f"touch {tool.place}/begun; exec sleep 77")
        moving = asyncio.create_task(backend.snapshot(rank))
        while not (tool.place / "begun").exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.01)
        os.kill(rank.process.pid, 9)
        backend.forget(rank.process)
        assert "status -9" in reason_of(await moving)[1]
        assert list(tool.files.iterdir()) == []

    tool.tell(story)


def test_a_program_that_cannot_be_run_lets_the_next_one_have_its_turn(
    tool: Tool, rank: RankId
) -> None:
    async def run() -> None:
        programs = Programs(tool.files, "test")
        plain = tool.place / "plain"
        plain.touch(mode=0o600)
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(ProgramError, match="Permission denied"):
                await programs.run(rank.process, [str(plain)])
            assert (await programs.run(rank.process, ["/bin/true"])).status == 0

    asyncio.run(run())
