"""A process under test: does what it is told on stdin, by plain ctypes calls into softcuda.

One agent can be a target (allocates, copies, launches), a caller (locks, checkpoints others) or
a reader of NVML. A command is one JSON line ``{"id", "thread", "name", "arguments"}``; it runs
in the named thread, so that a blocked one leaves the others usable, and is answered by one line
when it starts and one when it ends.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import queue
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

Json: TypeAlias = "int | float | str | list[Json] | dict[str, Json] | None"
Result: TypeAlias = "tuple[int, Json]"
Command: TypeAlias = Callable[..., Result]

RUNNING, LOCKED, CHECKPOINTED, FAILED = range(4)

output_lock = threading.Lock()
commands: dict[str, Command] = {}
libraries: dict[str, ctypes.CDLL] = {}


def cuda() -> ctypes.CDLL:
    if "cuda" not in libraries:
        libraries["cuda"] = ctypes.CDLL(os.environ.get("AGENT_LIBCUDA", "libcuda.so.1"))
    return libraries["cuda"]


def command(function: Command) -> Command:
    commands[function.__name__] = function
    return function


def pieces(size: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of the parts in which a large copy is made: a prime, so that no two pages
    of a repeated piece are alike."""
    longest = 1048573
    for offset in range(0, size, longest):
        yield offset, min(longest, size - offset)


# ---- a target's calls ----


@command
def init(flags: int = 0) -> Result:
    return cuda().cuInit(ctypes.c_uint(flags)), None


@command
def version() -> Result:
    value = ctypes.c_int()
    return cuda().cuDriverGetVersion(ctypes.byref(value)), value.value


@command
def error_name(code: int) -> Result:
    text = ctypes.c_char_p()
    result = cuda().cuGetErrorName(code, ctypes.byref(text))
    return result, text.value.decode() if text.value else None


@command
def device_count() -> Result:
    value = ctypes.c_int()
    return cuda().cuDeviceGetCount(ctypes.byref(value)), value.value


@command
def device_uuid(ordinal: int) -> Result:
    value = (ctypes.c_uint8 * 16)()
    return cuda().cuDeviceGetUuid_v2(ctypes.byref(value), ordinal), bytes(value).hex()


@command
def device_name(ordinal: int) -> Result:
    value = ctypes.create_string_buffer(64)
    return cuda().cuDeviceGetName(value, 64, ordinal), value.value.decode()


@command
def device_total(ordinal: int) -> Result:
    value = ctypes.c_size_t()
    return cuda().cuDeviceTotalMem_v2(ctypes.byref(value), ordinal), value.value


@command
def device_attribute(attribute: int, ordinal: int) -> Result:
    value = ctypes.c_int()
    return cuda().cuDeviceGetAttribute(ctypes.byref(value), attribute, ordinal), value.value


@command
def context(ordinal: int = 0) -> Result:
    """Retains the primary context of a device and makes it current in this thread."""
    handle = ctypes.c_void_p()
    result = cuda().cuDevicePrimaryCtxRetain(ctypes.byref(handle), ordinal)
    if result == 0:
        result = cuda().cuCtxSetCurrent(handle)
    return result, handle.value


@command
def release_context(ordinal: int = 0) -> Result:
    return cuda().cuDevicePrimaryCtxRelease_v2(ordinal), None


@command
def create_context(ordinal: int = 0) -> Result:
    handle = ctypes.c_void_p()
    return cuda().cuCtxCreate_v2(ctypes.byref(handle), 0, ordinal), handle.value


@command
def destroy_context(handle: int) -> Result:
    return cuda().cuCtxDestroy_v2(ctypes.c_void_p(handle)), None


@command
def set_context(handle: int | None) -> Result:
    return cuda().cuCtxSetCurrent(ctypes.c_void_p(handle)), None


@command
def current_context() -> Result:
    handle = ctypes.c_void_p()
    return cuda().cuCtxGetCurrent(ctypes.byref(handle)), handle.value


@command
def current_device() -> Result:
    value = ctypes.c_int(-1)
    return cuda().cuCtxGetDevice(ctypes.byref(value)), value.value


@command
def allocate(size: int) -> Result:
    address = ctypes.c_uint64()
    result = cuda().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size))
    return result, address.value


@command
def allocate_managed(size: int) -> Result:
    address = ctypes.c_uint64()
    result = cuda().cuMemAllocManaged(ctypes.byref(address), ctypes.c_size_t(size), 1)
    return result, address.value


@command
def free(address: int) -> Result:
    return cuda().cuMemFree_v2(ctypes.c_uint64(address)), None


@command
def memory_info() -> Result:
    unused, total = ctypes.c_size_t(), ctypes.c_size_t()
    result = cuda().cuMemGetInfo_v2(ctypes.byref(unused), ctypes.byref(total))
    return result, [unused.value, total.value]


@command
def write(address: int, seed: int, size: int) -> Result:
    """Copies bytes made from `seed` to the device; tells their SHA-256."""
    data = memoryview(random.Random(seed).randbytes(4099) * 256)
    copy, total = cuda().cuMemcpyHtoD_v2, hashlib.sha256()
    for offset, length in pieces(size):
        result = copy(ctypes.c_uint64(address + offset), data.obj, ctypes.c_size_t(length))
        if result:
            return result, None
        total.update(data[:length])
    return 0, total.hexdigest()


@command
def digest(address: int, size: int) -> Result:
    """Copies from the device; tells the SHA-256 of what came."""
    data = ctypes.create_string_buffer(min(size, 4099 * 256))
    copy, total = cuda().cuMemcpyDtoH_v2, hashlib.sha256()
    for offset, length in pieces(size):
        result = copy(data, ctypes.c_uint64(address + offset), ctypes.c_size_t(length))
        if result:
            return result, None
        total.update(memoryview(data)[:length])
    return 0, total.hexdigest()


@command
def read(address: int, size: int) -> Result:
    data = ctypes.create_string_buffer(size)
    result = cuda().cuMemcpyDtoH_v2(data, ctypes.c_uint64(address), ctypes.c_size_t(size))
    return result, data.raw.hex()


@command
def write_from(address: int, host_address: int, size: int) -> Result:
    source = ctypes.c_void_p(host_address)
    return cuda().cuMemcpyHtoD_v2(ctypes.c_uint64(address), source, ctypes.c_size_t(size)), None


@command
def copy(destination: int, source: int, size: int) -> Result:
    return (
        cuda().cuMemcpyDtoD_v2(
            ctypes.c_uint64(destination), ctypes.c_uint64(source), ctypes.c_size_t(size)
        ),
        None,
    )


@command
def memset8(address: int, value: int, count: int) -> Result:
    arguments = ctypes.c_uint64(address), ctypes.c_ubyte(value), ctypes.c_size_t(count)
    return cuda().cuMemsetD8_v2(*arguments), None


@command
def memset32(address: int, value: int, count: int) -> Result:
    arguments = ctypes.c_uint64(address), ctypes.c_uint(value), ctypes.c_size_t(count)
    return cuda().cuMemsetD32_v2(*arguments), None


@command
def launch(ms: int) -> Result:
    return cuda().softcudaLaunch(ms), None


@command
def synchronize() -> Result:
    return cuda().cuCtxSynchronize(), None


@command
def all_reduce(
    path: str, ranks: int, rank: int, run_ahead: int, count: int = 1, gap_s: float = 0
) -> Result:
    """Joins `count` collectives, with host work of `gap_s` after each."""
    result = 0
    for _ in range(count):
        result = result or cuda().softcudaAllReduce(path.encode(), ranks, rank, run_ahead)
        time.sleep(gap_s)
    return result, None


@command
def touch(address: int) -> Result:
    """Dereferences device memory on the host."""
    return 0, ctypes.string_at(address, 1)[0]


# ---- a caller's calls ----


@command
def state(pid: int) -> Result:
    value = ctypes.c_uint(99)
    return cuda().cuCheckpointProcessGetState(pid, ctypes.byref(value)), value.value


@command
def restore_thread(pid: int) -> Result:
    value = ctypes.c_int(-1)
    return cuda().cuCheckpointProcessGetRestoreThreadId(pid, ctypes.byref(value)), value.value


def block(words: list[int] | None) -> ctypes.Array[ctypes.c_uint64] | None:
    """The eight words of an argument block, or NULL."""
    return None if words is None else (ctypes.c_uint64 * 8)(*words)


@command
def lock(pid: int, timeout_ms: int = 0, reserved: list[int] | None = None) -> Result:
    words = [timeout_ms, *(reserved or [0] * 7)]
    return cuda().cuCheckpointProcessLock(pid, block(words)), None


@command
def checkpoint(pid: int, words: list[int] | None = None) -> Result:
    return cuda().cuCheckpointProcessCheckpoint(pid, block(words)), None


@command
def restore(pid: int, words: list[int] | None = None) -> Result:
    return cuda().cuCheckpointProcessRestore(pid, block(words)), None


@command
def restore_to(pid: int, pairs: list[list[str]]) -> Result:
    """Restores with a device map of (old UUID, new UUID) in hexadecimal."""
    table = b"".join(bytes.fromhex(old) + bytes.fromhex(new) for old, new in pairs)
    buffer = ctypes.create_string_buffer(table, len(table))
    words = [ctypes.addressof(buffer), len(pairs), 0, 0, 0, 0, 0, 0]
    return cuda().cuCheckpointProcessRestore(pid, block(words)), None


@command
def unlock(pid: int, words: list[int] | None = None) -> Result:
    return cuda().cuCheckpointProcessUnlock(pid, block(words)), None


# ---- the process itself ----


@command
def set_environment(name: str, value: str) -> Result:
    os.environ[name] = value
    return 0, None


@command
def fork() -> Result:
    """Forks without exec. Tells the child's pid and what cuInit and cuMemGetInfo said there."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        results = [init()[0], memory_info()[0]]
        os.write(writing, json.dumps(results).encode())
        signal.pause()
        os._exit(0)
    answer = json.loads(os.read(reading, 100))
    return 0, [child, *answer]


@command
def reap(pid: int) -> Result:
    """Ends a child and waits for it."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return 0, None


@command
def become(uid: int) -> Result:
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    return 0, None


@command
def nvml(name: str, *arguments: Json) -> Result:
    """Calls pynvml. A device is given by its index; structures come back as dictionaries."""
    import pynvml  # not every agent needs it

    def plain(value: object) -> Json:
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        if value is None or isinstance(value, int | float | str):
            return value
        fields = ["pid", "usedGpuMemory", "total", "free", "used", "reserved", "gpu", "memory"]
        fields += ["busId", "busIdLegacy", "bus", "domain", "device"]
        return {field: plain(getattr(value, field)) for field in fields if hasattr(value, field)}

    path = os.environ.get("AGENT_LIBNVML")
    if path and "nvml" not in libraries:
        libraries["nvml"] = ctypes.CDLL(path)
    try:
        if name.startswith("nvmlDevice") and name != "nvmlDeviceGetCount" and "Handle" not in name:
            index, *rest = arguments
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            return 0, plain(getattr(pynvml, name)(handle, *rest))
        found = getattr(pynvml, name)(*arguments)
        return 0, pynvml.nvmlDeviceGetIndex(found) if "Handle" in name else plain(found)
    except pynvml.NVMLError as error:
        return error.value, None


# ---- the machinery ----


def answer(identifier: int, kind: str, **fields: Json) -> None:
    line = json.dumps({"id": identifier, "kind": kind, **fields})
    with output_lock:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def serve(todo: queue.SimpleQueue[dict[str, Json]]) -> None:
    while True:
        request = todo.get()
        identifier = int(str(request["id"]))
        arguments = request["arguments"]
        assert isinstance(arguments, list)
        answer(identifier, "started", value=threading.get_native_id())
        result, value = commands[str(request["name"])](*arguments)
        answer(identifier, "ended", result=result, value=value, at=time.monotonic())


def main() -> None:
    threads: dict[str, queue.SimpleQueue[dict[str, Json]]] = {}
    answer(0, "started", value=os.getpid())
    for line in sys.stdin:
        request = json.loads(line)
        name = request["thread"]
        if name not in threads:
            threads[name] = queue.SimpleQueue()
            threading.Thread(target=serve, args=(threads[name],), daemon=True).start()
        threads[name].put(request)


if __name__ == "__main__":
    main()
