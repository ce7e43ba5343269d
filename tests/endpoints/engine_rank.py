"""A serving engine for tests: real device memory, and the control interface of vLLM or SGLang.

It takes commands as ``rank.py`` does, and these besides. What engines were seen to do wrong, it
does when it is told so in a file of ``name value`` lines, which is read at each request.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))

import rank

#: Ends a process as an illegal memory access does.
ILLEGAL_ACCESS = 139


CHANGES = ("/sleep", "/wake_up", "/release_memory_occupation", "/resume_memory_occupation")


class RequestError(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Engine:
    """Weights and a cache on a device, requests in flight, and where all of that is."""

    def __init__(self, kind: str, weights_mib: int, cache_mib: int, faults: Path) -> None:
        self.kind, self.faults = kind, faults
        self.weights_mib, self.cache_mib = weights_mib, cache_mib
        self.lock = threading.Condition()
        self.order = threading.Lock()
        self.in_flight = 0
        self.paused = False
        self.flushed = False
        #: What is away from the device.
        self.away: set[str] = set()
        self.host_copy: list[bytes] | None = None
        self.requests: list[str] = []
        rank.context()
        rank.fill(weights_mib, seed=os.getpid())
        self.cache = self._allocate(cache_mib)

    def fault(self, name: str) -> str | None:
        """Returns what the file of faults says of a name."""
        lines = self.faults.read_text().splitlines() if self.faults.exists() else []
        for line in lines:
            key, _, value = line.partition(" ")
            if key == name:
                return value
        return None

    def _allocate(self, mib: int) -> int:
        address = ctypes.c_uint64()
        rank.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(mib * rank.MIB))
        return address.value

    # --- requests of clients --------------------------------------------------------------

    def generate(self, seconds: float) -> None:
        """Works on a request, as soon as it is not paused."""
        with self.lock:
            assert self.lock.wait_for(lambda: not self.paused, 60)
            if self.away:
                os._exit(ILLEGAL_ACCESS)
            self.in_flight += 1
        time.sleep(seconds)
        with self.lock:
            if self.away:
                os._exit(ILLEGAL_ACCESS)
            self.in_flight = max(0, self.in_flight - 1)
            self.lock.notify_all()

    # --- control --------------------------------------------------------------------------

    def pause(self, mode: str) -> None:
        self.paused = True
        if mode == "wait":
            with self.lock:
                self.lock.wait_for(lambda: not self.in_flight, 60)

    def unpause(self) -> None:
        with self.lock:
            self.paused = False
            self.flushed = False
            self.lock.notify_all()

    def release(self, *, keep_weights: bool) -> None:
        """Frees its memory, in the way that it is told to do that wrong."""
        if self.in_flight:
            os._exit(ILLEGAL_ACCESS)
        if self.fault("release") == "nothing":
            return
        if self.fault("release") == "error":
            raise RequestError(500, "it could not be released, " + (self.fault("secret") or ""))
        delay_s = float(self.fault("release-takes") or 0)
        if (late_s := self.fault("free-late")) is not None:
            # It answers before it is done.
            threading.Thread(target=self._free_late, args=(float(late_s), keep_weights)).start()
            return
        with self._turn():
            time.sleep(delay_s)
            self._free(keep_weights=keep_weights)

    def _free_late(self, seconds: float, keep_weights: bool) -> None:
        time.sleep(seconds)
        rank.context()
        self._free(keep_weights=keep_weights)

    def _free(self, *, keep_weights: bool) -> None:
        (address, size) = rank.blocks[0]
        if keep_weights:
            self.host_copy = []
            for offset, length in rank.pieces(size):
                piece = ctypes.create_string_buffer(length)
                source = ctypes.c_uint64(address + offset)
                rank.call("cuMemcpyDtoH_v2", piece, source, ctypes.c_size_t(length))
                self.host_copy.append(piece.raw)
        rank.call("cuMemFree_v2", ctypes.c_uint64(address))
        rank.call("cuMemFree_v2", ctypes.c_uint64(self.cache))
        self.away = {"weights", "kv_cache"}

    def occupy(self, tags: set[str]) -> None:
        """Takes memory again; weights that were not kept come back as garbage."""
        for tag in ("weights", "kv_cache"):
            if tag not in tags & self.away:
                continue
            with self._turn():
                if self.fault("occupy") == tag:
                    raise RequestError(500, f"CUDA out of memory for {tag}")
                if tag == "kv_cache":
                    self.cache = self._allocate(self.cache_mib)
                else:
                    rank.blocks[0] = (self._allocate(self.weights_mib), rank.blocks[0][1])
                    self._copy_back()
                self.away.discard(tag)

    def _copy_back(self) -> None:
        address, size = rank.blocks[0]
        pieces, self.host_copy = self.host_copy, None
        for (offset, length), data in zip(rank.pieces(size), pieces or (), strict=False):
            target = ctypes.c_uint64(address + offset)
            rank.call("cuMemcpyHtoD_v2", target, data, ctypes.c_size_t(length))

    def reload_weights(self) -> None:
        """Reads the weights anew, from where they came."""
        rank.call("cuMemFree_v2", ctypes.c_uint64(rank.blocks.pop(0)[0]))
        rank.fill(self.weights_mib, seed=os.getpid())

    def _turn(self) -> Turn:
        return Turn(self.faults.with_name("moving"))


class Turn:
    """Two engines that move on one device at a time never end."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("w")

    def __enter__(self) -> None:
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            threading.Event().wait()

    def __exit__(self, *_: object) -> None:
        self.file.close()


class Handler(BaseHTTPRequestHandler):
    """Answers as the documentation of vLLM and SGLang has it."""

    engine: ClassVar[Engine]

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads it."""

    def _answer(self) -> None:
        engine = self.engine
        url = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        engine.requests.append(f"{self.path} {body.decode()}".strip())
        rank.context()  # a context is current in one thread only
        if engine.fault("hang") == url.path:
            threading.Event().wait()
        try:
            # What changes where it is it does in the order in which it is asked.
            with engine.order if url.path in CHANGES else contextlib.nullcontext():
                answer = self._carry_out(url.path, parse_qs(url.query), body)
            self._send(200, answer)
        except RequestError as exc:
            self._send(exc.status, {"error": str(exc)})
        except rank.DriverError as exc:
            self._send(500, {"error": str(exc)})

    def _carry_out(self, path: str, query: dict[str, list[str]], body: bytes) -> object:
        engine = self.engine
        if engine.fault("token") not in (None, self.headers.get("Authorization")):
            raise RequestError(401, f"no: {self.headers.get('Authorization')}")
        routes = self._vllm if engine.kind == "vllm" else self._sglang
        return routes(path, query, body)

    def _send(self, status: int, answer: object) -> None:
        data = b"" if answer is None else json.dumps(answer).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            # Who asked has given up.
            self.close_connection = True

    def _vllm(self, path: str, query: dict[str, list[str]], body: bytes) -> object:
        engine = self.engine
        match self.command, path:
            case "POST", "/pause" if engine.fault("pause") != "unknown":
                engine.pause(query["mode"][0])
                return {"status": "paused"}
            case "POST", "/resume":
                engine.unpause()
                return {"status": "resumed"}
            case "POST", "/sleep":
                if not engine.away:
                    engine.release(keep_weights=query.get("level") == ["1"])
                return None
            case "POST", "/wake_up":
                engine.occupy(set(query.get("tags", ["weights", "kv_cache"])))
                if not engine.away:
                    engine.unpause()
                return None
            case "POST", "/collective_rpc" if json.loads(body) == {"method": "reload_weights"}:
                engine.reload_weights()
                return {"results": [None]}
            case "GET", "/is_sleeping":
                says = engine.fault("is_sleeping")
                asleep = bool(engine.away) or engine.paused
                return {"is_sleeping": json.loads(says) if says else asleep}
            case _:
                raise RequestError(404, "Not Found")

    def _sglang(self, path: str, _query: object, body: bytes) -> object:
        engine = self.engine
        # The body is required.
        options = json.loads(body) if body else None
        if self.command != "POST" or options is None:
            raise RequestError(422, "Field required")
        match path:
            case "/pause_generation":
                engine.pause(options["mode"])
                return {"status": "ok"}
            case "/abort_request":
                engine.in_flight = 0
                return None
            case "/flush_cache":
                if engine.in_flight:
                    raise RequestError(400, "Flush cache failed")
                engine.flushed = True
                return "Cache flushed."
            case "/continue_generation":
                engine.unpause()
                return {"status": "ok"}
            case "/release_memory_occupation":
                if not (engine.paused and engine.flushed) or len(engine.away) == 2:
                    os._exit(1)
                engine.release(keep_weights=True)
                return None
            case "/resume_memory_occupation":
                if not engine.away and engine.fault("release") != "nothing":
                    os._exit(1)
                engine.occupy({"weights", "kv_cache"})
                return None
            case _:
                raise RequestError(404, "Not Found")


@rank.command
def serve(weights: int = 24, cache: int = 8) -> int:
    """Loads weights and listens where the environment says."""
    kind, _, url = os.environ["ENGINE"].partition("+")
    faults = Path(os.environ["ENGINE_FAULTS"])
    Handler.engine = Engine(kind, weights, cache, faults)
    port = int(url.rpartition(":")[2])
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return port


@rank.command
def generate(seconds: float) -> None:
    """Works on a request in the background."""
    engine = Handler.engine
    threading.Thread(target=engine.generate, args=(seconds,), daemon=True).start()
    end = time.monotonic() + 10
    while not engine.in_flight and time.monotonic() < end:
        time.sleep(0.001)


@rank.command
def busy() -> int:
    """Returns how many requests are being worked on."""
    return Handler.engine.in_flight


@rank.command
def requests() -> list[str]:
    """Returns the requests for control so far."""
    return Handler.engine.requests


if __name__ == "__main__":
    rank.main()
