"""`make fuzz`: a million frames without a crash, a hang or a leak.

With atheris the inputs are guided by the coverage of the code that they reach, without it by the
answers that they bring about. All inputs since the server's last fresh start are in
`build/fuzz/inputs`, whatever happens to this process, and `--replay` runs such a file again.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import gc
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mutation import Mutator

if TYPE_CHECKING:
    from server_target import ServerTarget

    from tsliced.core.model import ProcessId

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
if __name__ == "__main__":
    # pytest does this for the tests. What needs it is imported later, so that it can be watched.
    for part in ("", "tests/golden", "tests/tsliced", "tests/tsliced/host", "tests/e2e"):
        sys.path.insert(0, str(ROOT / part))

#: Inputs that one server lives through. Then a fresh one begins, so that what an input finds does
#: not hang on a history of hours.
INPUTS_PER_SERVER = 500
#: An input is some dozen frames, which take milliseconds.
HANG_S = 60.0
#: What a run may grow by after its first tenth. A leak of 100 bytes for a frame would be thrice as
#: much in a million frames. libFuzzer's own corpus is in it.
GROWTH_BYTES = 32 << 20
#: Python objects that a fresh server may find more of than the one before.
GROWTH_OBJECTS = 5000
MOST_FRAMES_IN_INPUT = 400
#: One input for the readers of files and hosts for so many frames.
FRAMES_PER_FILE = 50


class LeakError(AssertionError):
    """This process has grown."""


def resident_bytes() -> int:
    """Returns the anonymous memory of this process that is resident."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


class Inputs:
    """A file of all inputs since the last fresh start."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb", buffering=0)

    def start(self) -> None:
        self._file.seek(0)
        self._file.truncate()

    def add(self, data: bytes) -> None:
        self._file.write(len(data).to_bytes(4, "big") + data)

    def close(self) -> None:
        self._file.close()

    @staticmethod
    def read(path: Path) -> Iterator[bytes]:
        """Yields the inputs of a file."""
        data, start = path.read_bytes(), 0
        while start < len(data):
            end = start + 4 + int.from_bytes(data[start : start + 4], "big")
            yield data[start + 4 : end]
            start = end


@dataclass(slots=True)
class Growth:
    """Sees whether this process grows from one fresh server to the next."""

    frames_at_base: int = 0
    base_bytes: int = 0
    base_objects: int = 0
    objects: int = 0

    def look(self, frames: int, of: int) -> None:
        """Look at this process while it has no server."""
        gc.collect()
        self.objects = len(gc.get_objects())
        if not self.base_bytes or frames < of // 10:
            self.base_bytes, self.base_objects = resident_bytes(), self.objects
        if self.grown_bytes > GROWTH_BYTES:
            raise LeakError(f"this process grew by {self.grown_bytes >> 20} MiB")
        if self.objects - self.base_objects > GROWTH_OBJECTS:
            raise LeakError(f"{self.objects - self.base_objects} objects were left behind")

    @property
    def grown_bytes(self) -> int:
        return resident_bytes() - self.base_bytes if self.base_bytes else 0


@dataclass(slots=True)
class Run:
    """One run: servers, one after the other, until there were enough frames."""

    directory: Path
    frames_wanted: int
    duration_s: float | None
    inputs: Inputs
    frames: int = 0
    runs: int = 0
    behaviours: set[str] = field(default_factory=set)
    growth: Growth = field(default_factory=Growth)
    _started_at: float = field(default_factory=time.monotonic)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _ranks: list[ProcessId] = field(default_factory=list)
    _stack: ExitStack = field(default_factory=ExitStack)
    _server: Server | None = None

    def open(self) -> None:
        from server_target import ranks

        self._ranks = self._stack.enter_context(ranks())

    def close(self) -> None:
        """End the server, and see once more whether it left anything."""
        try:
            if self._server is not None:
                self._server.close()
                self._server = None
                self.growth.look(self.frames, self.frames_wanted)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Leave nothing open, whatever state it is in. May be repeated."""
        server, self._server = self._server, None
        if server is not None:
            with suppress(Exception):
                server.close()
        self._stack.close()
        self._loop.close()
        self.inputs.close()
        faulthandler.cancel_dump_traceback_later()

    @property
    def over(self) -> bool:
        """Whether it was enough."""
        if self.duration_s is not None:
            return time.monotonic() - self._started_at >= self.duration_s
        return self.frames >= self.frames_wanted

    def one(self, data: bytes) -> bool:
        """Run one input; return whether it brought something new."""
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        if self.runs % INPUTS_PER_SERVER == 0:
            self._start_afresh()
        assert self._server is not None
        self.runs += 1
        self.inputs.add(data)
        target = self._server.target
        before = len(self.behaviours)
        self._loop.run_until_complete(target.run(data))
        self.frames += target.frames
        target.frames = 0
        return len(self.behaviours) > before

    def _start_afresh(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
            self.growth.look(self.frames, self.frames_wanted)
        self.inputs.start()
        self._server = Server(self._loop, self.directory / str(self.runs), self._ranks)
        self._server.target.behaviours = self.behaviours

    def summary(self) -> str:
        """What it was, in a line."""
        seconds = time.monotonic() - self._started_at
        return (
            f"{self.frames} frames in {self.runs} inputs and {seconds:.0f} s, "
            f"{len(self.behaviours)} different answers, "
            f"grown by {self.growth.grown_bytes / (1 << 20):.1f} MiB"
        )


class Server:
    """A server target that stays open between inputs."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, directory: Path, ranks: list[ProcessId]
    ) -> None:
        self._loop = loop
        self._directory = directory
        self._stop = asyncio.Event()
        opened: asyncio.Future[ServerTarget] = loop.create_future()
        directory.mkdir(parents=True)
        # In a task of its own: a group of tasks belongs to the one that began it.
        self._task = loop.create_task(self._keep(opened, ranks))
        self.target: ServerTarget = loop.run_until_complete(opened)

    async def _keep(self, opened: asyncio.Future[ServerTarget], ranks: list[ProcessId]) -> None:
        from server_target import server_target

        async with AsyncExitStack() as stack:
            target = await stack.enter_async_context(server_target(self._directory, ranks))
            opened.set_result(target)
            await self._stop.wait()

    def close(self) -> None:
        self._stop.set()
        self._loop.run_until_complete(self._task)
        shutil.rmtree(self._directory)


@contextmanager
def opened_run(directory: Path, frames: int, duration_s: float | None) -> Iterator[Run]:
    """A run whose files are below a directory."""
    shutil.rmtree(directory / "servers", ignore_errors=True)
    inputs = Inputs(directory / "inputs")
    run = Run(directory / "servers", frames, duration_s, inputs)
    run.open()
    try:
        yield run
        run.close()
    finally:
        run.abandon()


def mutate(run: Run, seed: int) -> None:
    """Fuzz by mutation."""
    mutator = Mutator(seed)
    while not run.over:
        data = mutator.next()
        if run.one(data):
            mutator.keep(data)


def fuzz_readers(directory: Path, seed: int, count: int) -> list[str]:
    """Fuzz the readers of files and of other hosts' words; return the different outcomes."""
    from file_targets import kept_log_target, op_file_target
    from peer_target import peer_target

    directory.mkdir(parents=True, exist_ok=True)
    outcomes: set[str] = set()
    targets: list[Callable[[bytes], str]] = [
        kept_log_target(directory),
        op_file_target(directory),
        peer_target(),
    ]
    for target in targets:
        mutator = Mutator(seed)
        for _ in range(count):
            data = mutator.next()
            outcome = target(data)
            if outcome not in outcomes:
                outcomes.add(outcome)
                mutator.keep(data)
    return sorted(outcomes)


def guide_by_coverage(run: Run, seed: int) -> None:
    """Fuzz with atheris, which ends this process."""
    import atheris

    corpus = run.directory.parent / "corpus"
    shutil.rmtree(corpus, ignore_errors=True)
    corpus.mkdir()
    mutator = Mutator(seed)
    for number in range(64):
        (corpus / f"seed-{number}").write_bytes(mutator.next())

    def one(data: bytes) -> None:
        # libFuzzer ends this process without a look at what Python would still have to do.
        try:
            run.one(data)
        except BaseException:
            run.abandon()
            raise
        if run.over:
            run.close()
            sys.stdout.write(f"{run.summary()}\n")
            sys.stdout.flush()
            os._exit(0)

    libfuzzer = [
        f"-seed={seed % (1 << 32)}",
        f"-timeout={HANG_S:.0f}",
        "-rss_limit_mb=2048",
        f"-max_len={MOST_FRAMES_IN_INPUT}",
        f"-artifact_prefix={run.directory.parent}/",
        "-print_final_stats=1",
    ]
    atheris.Setup([sys.argv[0], *libfuzzer, str(corpus)], one)
    atheris.Fuzz()


def has_atheris() -> bool:
    """Whether this environment has it; and if so, has it watch the code that is fuzzed."""
    try:
        import atheris
    except ImportError:
        return False
    with atheris.instrument_imports(include=["libtimeslice", "tsliced.net", "tsliced.core"]):
        import server_target  # noqa: F401 - all that it imports is watched from now on
    return True


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fuzz the daemon's socket and its files.")
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--duration", type=float, help="seconds; instead of a number of frames")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--engine", choices=("auto", "atheris", "mutation"), default="auto")
    parser.add_argument("--directory", type=Path, default=ROOT / "build" / "fuzz")
    parser.add_argument("--replay", type=Path, help="a file of inputs, to be run once")
    return parser.parse_args()


def main() -> None:
    """Run until it was enough; a traceback says what was found."""
    options = arguments()
    say = sys.stdout.write
    if options.replay is not None:
        inputs = list(Inputs.read(options.replay))
        with opened_run(options.directory, 0, None) as run:
            for data in inputs:
                run.one(data)
        say(f"{run.summary()}\n")
        return
    guided = options.engine != "mutation" and has_atheris()
    if options.engine == "atheris" and not guided:
        sys.exit("atheris is not installed; make fuzz installs it where it can be had")
    engine = "atheris" if guided else "mutation"
    say(f"fuzzing with {engine}, seed {options.seed}; --seed {options.seed} does it again\n")
    sys.stdout.flush()
    count = max(1000, options.frames // FRAMES_PER_FILE)
    outcomes = fuzz_readers(options.directory / "files", options.seed, count)
    say(f"files and hosts: {count} inputs for each reader, {len(outcomes)} different outcomes\n")
    with opened_run(options.directory, options.frames, options.duration) as run:
        if guided:
            guide_by_coverage(run, options.seed)
        else:
            mutate(run, options.seed)
    say(f"{run.summary()}\n")


if __name__ == "__main__":
    main()
