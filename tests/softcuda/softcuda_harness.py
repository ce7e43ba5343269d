"""Runs agents (see softcuda_agent) and talks to them. Every wait has a limit."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

MIB = 1 << 20
LIMIT_S = 20.0
# How long a call that must block is watched before that is believed.
BLOCKED_S = 0.15

RUNNING, LOCKED, CHECKPOINTED, FAILED = range(4)
OPERATIONS = ("lock", "checkpoint", "restore", "unlock")


@dataclass(slots=True)
class Call:
    """One command in flight."""

    name: str
    changed: threading.Condition
    thread_id: int | None = None
    answer: dict[str, Any] | None = None
    agent_ended: bool = False

    def wait_started(self, limit_s: float = LIMIT_S) -> int:
        """Waits until the agent is about to make the call; returns the id of its thread."""
        with self.changed:
            self.changed.wait_for(lambda: self.thread_id or self.agent_ended, limit_s)
            assert self.thread_id is not None, f"{self.name} did not start in {limit_s} s"
            return self.thread_id

    def is_blocked(self, for_s: float = BLOCKED_S) -> bool:
        """True if the call has started and does not end within `for_s`."""
        self.wait_started()
        with self.changed:
            return not self.changed.wait_for(lambda: self.answer is not None, for_s)

    def wait(self, limit_s: float = LIMIT_S) -> tuple[int, Any]:
        """Waits for the end of the call; returns its result code and value."""
        with self.changed:
            self.changed.wait_for(lambda: self.answer or self.agent_ended, limit_s)
            assert self.answer is not None, f"{self.name} did not end in {limit_s} s"
            return self.answer["result"], self.answer["value"]

    @property
    def ended_at(self) -> float:
        """Monotonic time, common to all processes, at which the call returned."""
        assert self.answer is not None
        return float(self.answer["at"])


@dataclass(slots=True)
class Agent:
    process: subprocess.Popen[str]
    changed: threading.Condition = field(default_factory=threading.Condition)
    calls: dict[int, Call] = field(default_factory=dict)
    reader: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.calls[0] = Call("start", self.changed)
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            message = json.loads(line)
            with self.changed:
                call = self.calls[message["id"]]
                if message["kind"] == "started":
                    call.thread_id = message["value"]
                else:
                    call.answer = message
                self.changed.notify_all()
        with self.changed:
            for call in self.calls.values():
                call.agent_ended = True
            self.changed.notify_all()

    @property
    def pid(self) -> int:
        return self.process.pid

    def start(self, name: str, *arguments: object, thread: str = "main") -> Call:
        """Sends a command and returns at once."""
        identifier = len(self.calls)
        call = Call(name, self.changed)
        with self.changed:
            self.calls[identifier] = call
        request = {"id": identifier, "thread": thread, "name": name, "arguments": arguments}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return call

    def result(self, name: str, *arguments: object, thread: str = "main") -> int:
        """Runs a command and returns its result code."""
        return self.start(name, *arguments, thread=thread).wait()[0]

    def value(self, name: str, *arguments: object, thread: str = "main") -> Any:
        """Runs a command that must succeed and returns its value."""
        result, value = self.start(name, *arguments, thread=thread).wait()
        assert result == 0, f"{name}{arguments} returned {result}"
        return value

    def kill(self) -> None:
        """Kills the process and waits until it is reaped."""
        self.process.kill()
        self.process.wait(LIMIT_S)

    def finish(self, limit_s: float = LIMIT_S) -> int:
        """Lets the process exit by itself; returns its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(limit_s)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait(LIMIT_S)
        self.reader.join(LIMIT_S)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):  # a command that it did not live to read
                stream.close()


@dataclass(slots=True)
class Machine:
    """A directory of devices and the agents that use them."""

    directory: Path
    library_directory: Path
    environment: Mapping[str, str]
    agents: list[Agent] = field(default_factory=list)

    def variables(self, **extra: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if "CUDA" not in name}
        return {
            **kept,
            "LD_LIBRARY_PATH": str(self.library_directory),
            "SOFTCUDA_DIR": str(self.directory),
            **self.environment,
            **extra,
        }

    def agent(self, *prefix: str, **extra: str) -> Agent:
        """Starts an agent, in a `prefix` command if given, with `extra` in its environment."""
        program = Path(__file__).with_name("softcuda_agent.py")
        process = subprocess.Popen(
            [*prefix, sys.executable, str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self.variables(**extra),
            text=True,
        )
        agent = Agent(process)
        self.agents.append(agent)
        agent.calls[0].wait_started()
        return agent

    def target(self, megabytes: int = 0, ordinal: int = 0, **extra: str) -> Target:
        """Starts a target: initialized, with a context and an allocation filled with bytes."""
        agent = self.agent(**extra)
        agent.value("init")
        agent.value("context", ordinal)
        if not megabytes:
            return Target(agent)
        address = agent.value("allocate", megabytes * MIB)
        digest = agent.value("write", address, agent.pid, megabytes * MIB)
        return Target(agent, address, megabytes * MIB, digest)

    def fault(self, *lines: str) -> None:
        """Replaces the faults file."""
        temporary = self.directory / "faults.new"
        temporary.write_text("".join(line + "\n" for line in lines))
        temporary.rename(self.directory / "faults")

    def close(self) -> None:
        for agent in self.agents:
            agent.close()


class MakeMachine(Protocol):
    """The fixture of that name."""

    def __call__(self, *, fresh: bool = False, **environment: str) -> Machine: ...


@dataclass(slots=True)
class Target:
    """An agent that holds device memory."""

    agent: Agent
    address: int = 0
    size: int = 0
    written: str = ""

    @property
    def pid(self) -> int:
        return self.agent.pid

    def is_intact(self) -> bool:
        """True if the device holds what was written."""
        return bool(self.agent.value("digest", self.address, self.size) == self.written)


def all_blocked(*calls: Call, for_s: float = BLOCKED_S) -> bool:
    """True if all the calls have started and none ends within `for_s`."""
    for call in calls:
        call.wait_started()
    with calls[0].changed:
        calls[0].changed.wait_for(lambda: any(call.answer for call in calls), for_s)
    return all(call.answer is None for call in calls)


def reach(caller: Agent, pid: int, operation: str) -> int:
    """Brings a running target to the state from which the operation is legal; returns that."""
    before = {"lock": 0, "checkpoint": 1, "restore": 2, "unlock": 1}[operation]
    for name in OPERATIONS[:before]:
        assert caller.result(name, pid) == 0
    return int(caller.value("state", pid))


def park(caller: Agent, pid: int) -> None:
    """Takes a running target off its devices."""
    assert caller.result("lock", pid) == 0
    assert caller.result("checkpoint", pid) == 0


def wake(caller: Agent, pid: int) -> None:
    """Brings a parked target back."""
    assert caller.result("restore", pid) == 0
    assert caller.result("unlock", pid) == 0


def wait_until(condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    """Polls for something that no event announces."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "condition not met in time"
        time.sleep(0.005)


def memory_kib(pid: int, name: str) -> int:
    """A line of /proc/PID/status such as RssAnon, in KiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    raise KeyError(name)
