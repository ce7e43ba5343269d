"""What else one could take for the same job: a lock file, and calls of a general RPC library.

    python -m bench.yardsticks SOCKET BYTES_OF_ACQUIRE BYTES_OF_RELEASE

serves two unary calls with answers of those sizes.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import filelock
import grpc

from bench.load import LIMIT_S, PairTimes
from bench.server import Server

SERVICE = "tsliced.Bench"
CALLS = ("acquire", "release")
_THREADS = 4


class LockFile:
    """A lock that every process of the machine can take, without a queue and without a server."""

    def __init__(self, path: Path) -> None:
        self._lock = filelock.FileLock(path)

    def measure_pairs(self, count: int) -> PairTimes:
        """Takes the lock and lets it go, so many times."""
        times = PairTimes()
        clock = time.perf_counter_ns
        for _ in range(count):
            started_ns = clock()
            self._lock.acquire(timeout=LIMIT_S)
            taken_ns = clock()
            self._lock.release()
            free_ns = clock()
            times.acquire_ns.append(taken_ns - started_ns)
            times.release_ns.append(free_ns - taken_ns)
        return times


class GrpcCaller:
    """A client of the two calls, which carry as many bytes as a request to the daemon does."""

    def __init__(self, path: Path, request_bytes: tuple[int, int]) -> None:
        self._channel = grpc.insecure_channel(f"unix:{path}")
        grpc.channel_ready_future(self._channel).result(timeout=LIMIT_S)
        self._acquire, self._release = (
            self._channel.unary_unary(f"/{SERVICE}/{name}") for name in CALLS
        )
        self._acquire_body, self._release_body = (bytes(size) for size in request_bytes)

    def measure_pairs(self, count: int) -> PairTimes:
        """Makes both calls, one after the other, so many times."""
        times = PairTimes()
        clock = time.perf_counter_ns
        for _ in range(count):
            started_ns = clock()
            self._acquire(self._acquire_body, timeout=LIMIT_S)
            granted_ns = clock()
            self._release(self._release_body, timeout=LIMIT_S)
            released_ns = clock()
            times.acquire_ns.append(granted_ns - started_ns)
            times.release_ns.append(released_ns - granted_ns)
        return times

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()


def start_grpc(directory: Path, answer_bytes: tuple[int, int], *, core: int) -> Server:
    """Starts the server of the two calls; its socket and log lie in the directory."""
    path = directory / "grpc.sock"
    command = [sys.executable, "-m", "bench.yardsticks", str(path), *map(str, answer_bytes)]
    return Server(command, path=path, core=core, log=directory / "grpc.log")


def serve(path: str, answer_bytes: list[int]) -> None:
    """Answers both calls at a socket until the process is told to end."""
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(lambda request, context, body=bytes(size): body)
        for name, size in zip(CALLS, answer_bytes, strict=True)
    }
    server = grpc.server(ThreadPoolExecutor(_THREADS))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_insecure_port(f"unix:{path}")
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    serve(sys.argv[1], [int(size) for size in sys.argv[2:]])
