"""A process under test: holds device state, asks for leases, and does what it is told on stdin.

A command is one JSON line ``{"name", "arguments"}`` and is answered by one line, ``{"value"}`` or
``{"error": {"type", "code", "message"}}``; commands run one after the other. Device calls go by
ctypes to whatever libcuda.so.1 the dynamic linker finds, and nothing here knows of the daemon but
through `libtimeslice`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import hashlib
import json
import os
import random
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from history import Recorder, directory_of

import libtimeslice

# Loaded now: a rank that becomes another user may not be able to read the interpreter's own files.
import libtimeslice.client
from libtimeslice.connection import Connection
from libtimeslice.link import open_link
from libtimeslice.protocol import FrameReader, encode
from libtimeslice.session import Session

MIB = 1 << 20
#: Prime, so that no two pages of a repeated piece are alike.
PIECE_BYTES = 1048573

commands: dict[str, Callable[..., Any]] = {}


class DriverError(Exception):
    """A device call failed."""

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function} returned {code}")
        self.code = code


def command(function: Callable[..., Any]) -> Callable[..., Any]:
    commands[function.__name__] = function
    return function


# ---- device state


@cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def call(function: str, *arguments: object) -> None:
    code = getattr(driver(), function)(*arguments)
    if code:
        raise DriverError(function, code)


def pieces(size: int) -> Iterator[tuple[int, int]]:
    for offset in range(0, size, PIECE_BYTES):
        yield offset, min(PIECE_BYTES, size - offset)


#: Address and size of each block, in the order in which they were made.
blocks: list[tuple[int, int]] = []


@command
def context(device: int = 0) -> None:
    """Makes a context on a device: from then on the driver knows this process."""
    handle = ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(handle), device)
    call("cuCtxSetCurrent", handle)


@command
def fill(mib: int, seed: int = 0) -> None:
    """Allocates a block on the device of the context and fills it with bytes made from `seed`."""
    address, size = ctypes.c_uint64(), mib * MIB
    call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
    data = random.Random(seed).randbytes(4099) * 256
    for offset, length in pieces(size):
        target = ctypes.c_uint64(address.value + offset)
        call("cuMemcpyHtoD_v2", target, data, ctypes.c_size_t(length))
    blocks.append((address.value, size))


@command
def managed(mib: int) -> None:
    """Allocates managed memory, which the driver cannot snapshot."""
    address = ctypes.c_uint64()
    call("cuMemAllocManaged", ctypes.byref(address), ctypes.c_size_t(mib * MIB), 1)


@command
def digest() -> str:
    """Copies all blocks back and returns their SHA-256."""
    total, buffer = hashlib.sha256(), ctypes.create_string_buffer(PIECE_BYTES)
    for address, size in blocks:
        for offset, length in pieces(size):
            source = ctypes.c_uint64(address + offset)
            call("cuMemcpyDtoH_v2", buffer, source, ctypes.c_size_t(length))
            total.update(memoryview(buffer)[:length])
    return total.hexdigest()


@command
def launch(ms: int) -> None:
    """Queues device work of that length; a freeze has to wait for its end."""
    call("softcudaLaunch", ms)


@command
def operate(operation: str, pid: int) -> None:
    """Does to another process what the daemon would do: lock, checkpoint, restore or unlock it."""
    arguments = (ctypes.c_uint64 * 8)()
    call(f"cuCheckpointProcess{operation.title()}", pid, arguments)


@command
def used_bytes(device: int) -> int:
    """Returns what NVML says is in use on a device."""
    import pynvml  # only the process that looks needs it

    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(device)).used)


# ---- the client library

calls: list[str] = []
leases: list[libtimeslice.Lease] = []


@cache
def client() -> libtimeslice.TimeSlice:
    # Ranks are killed at the end of a test: hardly any of them waits for a last turn.
    last_turn_s = float(os.environ.get("RANK_LAST_TURN_S", "0"))
    job = os.environ.get("RANK_JOB")
    return libtimeslice.connect(job=job, last_turn_s=last_turn_s, connect_timeout_s=20)


@cache
def recorder() -> Recorder:
    return Recorder(directory_of(os.environ.get("TSLICE_SOCKET", "/nowhere")))


def job() -> str | None:
    named = os.environ.get("TSLICE_JOB_ID") or client().job
    return f"{os.getuid()}/{named}" if named is not None else None


def take(groups: Any = None, **ask: Any) -> libtimeslice.Lease:
    """Acquires a lease, and writes down when it was asked for and what came of it."""
    names = [groups] if isinstance(groups, str) else list(groups or ())
    ranks = ask.get("ranks") or int(os.environ.get("WORLD_SIZE", "1"))
    number = recorder().invoke(job(), names, ranks)
    try:
        lease = client().acquire(groups, **ask)
    except BaseException as error:
        recorder().fail(number, str(getattr(error, "code", type(error).__name__)))
        raise
    recorder().ok(number, job() or "", lease.id, lease.tokens)
    return lease


def give_back(lease: libtimeslice.Lease) -> libtimeslice.Released | None:
    """Releases a lease, and writes that down before."""
    if lease.state is libtimeslice.LeaseState.LOST:
        recorder().lost(lease.id, lease.reason)
    else:
        recorder().release(lease.id)
    return client().release(lease)


def told(lease: libtimeslice.Lease) -> dict[str, Any]:
    return {
        "state": lease.state.value,
        "groups": list(lease.groups),
        "tokens": dict(lease.tokens),
        "waited_s": lease.waited_s,
        "restored": lease.restored,
        "switch_s": lease.switch_s,
        "contended": lease.contended,
    }


@command
def acquire(**ask: Any) -> dict[str, Any]:
    """Waits for a lease and holds it; returns what it tells."""
    leases.append(take(**ask))
    return told(leases[-1])


@command
def release() -> dict[str, Any]:
    """Gives the latest lease back."""
    released = give_back(leases.pop())
    return {} if released is None else released._asdict()


@command
def look() -> dict[str, Any]:
    """Returns what the latest lease tells by now."""
    return told(leases[-1])


@command
def initialise(group: str, mib: int, seed: int, timeout: float = 60) -> dict[str, Any]:
    """Takes a first turn and makes all device state in it, as a trainer does when it loads."""
    lease = take(group, phase="init", timeout=timeout)
    try:
        context()
        fill(mib, seed)
        return told(lease)
    finally:
        give_back(lease)


@command
def train(groups: list[str], turns: int) -> int:
    """Takes turns as fast as they come, and returns how many."""
    for _ in range(turns):
        give_back(take(groups, timeout=60))
    return turns


@command
def register() -> list[str]:
    return list(client().register())


@command
def keep_cached(mib: int) -> None:
    """Keeps device memory without need, as torch's caching allocator does, until asked to free it.

    A stand-in for torch has it: the real one knows no CUDA on a machine without a GPU.
    """
    address, kept = ctypes.c_uint64(), [mib * MIB]
    call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(mib * MIB))

    def empty_cache() -> None:
        calls.append("empty_cache")
        kept[0] = 0
        context()  # a context is current in one thread only, and this one is the agent's
        call("cuMemFree_v2", address)

    torch = types.ModuleType("torch")
    torch.__dict__["_C"] = types.SimpleNamespace()
    torch.__dict__["cuda"] = types.SimpleNamespace(
        is_initialized=lambda: True,
        current_device=lambda: 0,
        synchronize=lambda _device: None,
        memory_reserved=lambda _device: kept[0],
        empty_cache=empty_cache,
    )
    sys.modules["torch"] = torch


def note_called(callback: str) -> None:
    calls.append(callback)
    # So that it is known while this process waits for its turn.
    recorder().write("called", callback=callback)


@command
def hooks(failing: bool = False, seconds: float = 0.0, growing_mib: int = 0) -> None:
    """Registers callbacks around a move that take a time.

    The one before it raises if it is `failing`, or takes device memory first, once.
    """

    def pause(pause: libtimeslice.Pause) -> None:
        note_called("pause")
        time.sleep(seconds)
        if failing:
            raise RuntimeError("requests are in flight")
        if growing_mib and len(blocks) == 1:
            context()  # a context is current in one thread only
            fill(growing_mib)

    def resume(resume: libtimeslice.Resume) -> None:
        note_called("resume")
        time.sleep(seconds)

    ts = client()
    ts.on_pause(pause)
    ts.on_resume(resume)


@command
def watch() -> None:
    """Has it written down what is told of leases: warnings and losses, with their reasons."""
    ts = client()
    ts.on_hold_warning(lambda warning: calls.append(f"warning {warning.ends_in_s:.1f}"))
    ts.on_lost(lambda lost: calls.append(f"lost {lost.reason}"))


@command
def watch_moves() -> None:
    """Has it written down how far the moves come that its leases wait for."""
    client().on_waiting(
        lambda move: calls.append(f"{move.job} {move.step} {move.done_bytes} {move.total_bytes}")
    )


@command
def bye() -> None:
    """Says goodbye to the daemon, and lives on."""
    client().close()


@command
def save_at_exit(file: str) -> None:
    """Has the exit of the process use the device, as the driver's own handlers do."""

    def save() -> None:
        with open(file, "w") as saved:
            saved.write(digest())

    atexit.register(save)
    # Exit handlers run latest first, and a library that uses devices is there before its leases.
    atexit.unregister(libtimeslice.leaving.leave)
    atexit.register(libtimeslice.leaving.leave)


@command
def work_unasked(file: str) -> None:
    """Starts a thread that uses the device without a lease, and then makes a file."""

    def use() -> None:
        context()  # a context is current in one thread only
        call("cuCtxSynchronize")
        with open(file, "w") as done:
            done.write(digest())

    threading.Thread(target=use).start()


@command
def save_at_sigterm(file: str | None = None) -> None:
    """Has a handler for SIGTERM use the device, as one does that saves, and then end."""

    def save(_number: int, _frame: object) -> None:
        saved = digest()
        if file is not None:
            with open(f"{file}.new", "w") as target:
                target.write(saved)
            os.rename(f"{file}.new", file)
        os._exit(7)

    signal.signal(signal.SIGTERM, save)


@command
def crash(how: str) -> None:
    """Ends without any handler of this process."""
    if how == "exit":
        os._exit(3)
    ctypes.string_at(0)


@command
def fork_and_stay() -> int:
    """Leaves a child that has copies of all that is open here; returns its pid."""
    # Not by os.fork: no handler of any library hears of it.
    child = ctypes.CDLL(None).fork()
    if child == 0:
        while True:
            signal.pause()
    return int(child)


@command
def hang(seconds: float) -> None:
    """Computes and does nothing else, as a loop does that never ends."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


@command
def work(seconds: float) -> None:
    """Takes many small steps, and gives a sign of life with each."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        client().heartbeat()
        time.sleep(0.01)


@command
def called() -> list[str]:
    """Returns which callbacks ran, in order."""
    return calls


@command
def fork() -> int:
    """Makes a child that does nothing, and returns its pid."""
    child = os.fork()
    if not child:
        # It must not read this process's commands.
        signal.pause()
    return child


@command
def whoami() -> dict[str, int]:
    """Returns who this process believes to be."""
    return {"pid": os.getpid(), "uid": os.getuid()}


@command
def become(uid: int) -> None:
    """Goes on as another user."""
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


@command
def become_effective(uid: int) -> None:
    """Goes on as another user without ceasing to be the one that it is."""
    os.seteuid(uid)


@command
def lease_id() -> str:
    """Returns the name of the latest lease."""
    return leases[-1].id


@command
def ask(name: str, hello: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Sends one request on a connection of its own, opened with these fields in its hello."""
    opening = Session().hello(client="rank", role="client", job=None, caps=(), ranks=None)
    link = open_link(str(os.environ["TSLICE_SOCKET"]), {**opening, **hello}, limit_s=20)
    with Connection(link.sock, reader=link.reader) as connection:
        connection.take_over(link)
        answer = connection.request({"t": name, **fields}, 20)
        return {"job": link.welcome["job"], "groups": link.welcome["groups"], **answer}


def call_on(sock: socket.socket, hello: dict[str, Any]) -> dict[str, Any]:
    """Connects and says hello; returns what the daemon says to it."""
    sock.settimeout(20)
    sock.connect(os.environ["TSLICE_SOCKET"])
    opening = Session().hello(client="rank", role="client", job=None, caps=(), ranks=None)
    with contextlib.suppress(BrokenPipeError):  # one too many: it was said and hung up on
        sock.sendall(encode({**opening, **hello}))
    return FrameReader().feed(sock.recv(1 << 16))[0]


@command
def resume(session: str, secret: str) -> dict[str, Any]:
    """Tries to go on with a session."""
    with socket.socket(socket.AF_UNIX) as sock:
        said = call_on(sock, {"session": session, "secret": bytes.fromhex(secret)})
        sock.sendall(encode({"t": "bye"}))
        return {"resumed": said["resumed"], "leases": said["leases"]}


@command
def throng(sessions: int, requests: int) -> dict[str, list[str]]:
    """Opens sessions, and from each asks for a group so often; returns all that is refused."""
    refused: dict[str, list[str]] = {"refused sessions": [], "refused requests": []}
    with contextlib.ExitStack() as stack:
        opened: list[socket.socket] = []
        for _ in range(sessions):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            said = call_on(sock, {})
            if said["t"] == "welcome":
                opened.append(sock)
            else:
                refused["refused sessions"].append(said["message"])
        for sock in opened:
            asked = [{"t": "acquire", "id": n + 1, "groups": ["g1"]} for n in range(requests)]
            sock.sendall(b"".join(map(encode, [*asked, {"t": "ping", "id": requests + 1}])))
            reader = FrameReader()
            answers: list[dict[str, Any]] = []
            while not any(answer.get("re") == requests + 1 for answer in answers):
                answers += reader.feed(sock.recv(1 << 16))
            refused["refused requests"] += [a["err"]["message"] for a in answers if "err" in a]
        for sock in opened:
            sock.sendall(encode({"t": "bye"}))
            while sock.recv(1 << 16):
                pass
    return refused


@command
def crowd(count: int) -> list[str]:
    """Opens so many connections at one time; returns what the daemon says to each of them."""
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(count)]
        said = [call_on(sock, {"role": "tool"}) for sock in socks]
    return [str(message.get("message", message["t"])) for message in said]


def answer_to(line: str) -> dict[str, Any]:
    request = json.loads(line)
    try:
        return {"value": commands[request["name"]](**request["arguments"])}
    except (DriverError, libtimeslice.TimeSliceError) as error:
        return {
            "error": {"type": type(error).__name__, "code": error.code, "message": str(error)},
        }


def main() -> None:
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer_to(line)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
