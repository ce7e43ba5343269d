"""MUNGE: what one user's process writes on one host, the same user's process reads on another.

libmunge is called through ctypes; there is no binding in Debian, and these are six functions
(munge.h, munge(3)). Each call asks munged over a socket and may hang, so it has a thread.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Final, TypeVar

from tsliced.host.call_thread import CallThread

LIBRARY: Final = "libmunge.so.2"
# munge_opt_t of munge.h.
_OPT_SOCKET: Final = 8
_OPT_UID_RESTRICTION: Final = 9

Answer = TypeVar("Answer")


class MungeError(Exception):
    """A credential cannot be made, or is not good; the text says why."""


class Munge:
    """Makes and opens credentials. Belongs to the event loop; close it."""

    def __init__(self, socket: str | None, *, timeout_s: float) -> None:
        """Load the library; raises `MungeError` if it is not there. `socket` None: the usual."""
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as exc:
            text = f"{LIBRARY} cannot be loaded ({exc}); on Debian: apt-get install munge"
            raise MungeError(text) from exc
        self._free = ctypes.CDLL(None).free
        self._free.argtypes = [ctypes.c_void_p]
        self._library.munge_ctx_create.restype = ctypes.c_void_p
        self._library.munge_ctx_destroy.argtypes = [ctypes.c_void_p]
        self._library.munge_ctx_strerror.argtypes = [ctypes.c_void_p]
        self._library.munge_ctx_strerror.restype = ctypes.c_char_p
        self._library.munge_strerror.restype = ctypes.c_char_p
        self._socket = socket
        self._timeout_s = timeout_s
        self._thread = CallThread("munge")

    def close(self) -> None:
        """Let the thread end."""
        if self._thread.is_running:
            self._thread.stop()

    async def seal(self, payload: bytes) -> str:
        """Return a credential that only processes of this user can open. Raises `MungeError`."""
        return await self._call(lambda: self._seal(payload))

    async def open(self, credential: str) -> bytes:
        """Return what root or this user put into a credential. Raises `MungeError`."""
        return await self._call(lambda: self._open(credential))

    async def _call(self, function: Callable[[], Answer]) -> Answer:
        if not self._thread.is_running:
            self._thread.start()
        try:
            return await self._thread.call(function, self._timeout_s)
        except TimeoutError as exc:
            raise MungeError("munged does not answer in time") from exc

    # --- in the thread ------------------------------------------------------------------------

    def _seal(self, payload: bytes) -> str:
        context = self._context()
        made = ctypes.c_void_p()
        try:
            error = self._library.munge_encode(
                ctypes.byref(made), ctypes.c_void_p(context), payload, len(payload)
            )
            self._check(error, context)
            return ctypes.string_at(made.value or 0).decode("ascii")
        finally:
            self._free(made)
            self._library.munge_ctx_destroy(context)

    def _open(self, credential: str) -> bytes:
        context = self._context()
        data, length = ctypes.c_void_p(), ctypes.c_int()
        uid, gid = ctypes.c_uint32(), ctypes.c_uint32()
        try:
            error = self._library.munge_decode(
                credential.encode(),
                ctypes.c_void_p(context),
                *map(ctypes.byref, (data, length, uid, gid)),
            )
            # A credential that was replayed or is too old is decoded all the same, with an error.
            self._check(error, context)
            if uid.value not in (0, os.geteuid()):
                raise MungeError(f"a credential of uid {uid.value}, who runs no daemon here")
            return ctypes.string_at(data.value, length.value) if data.value else b""
        finally:
            self._free(data)
            self._library.munge_ctx_destroy(context)

    def _context(self) -> int:
        context: int | None = self._library.munge_ctx_create()
        if not context:
            raise MungeError("there is no memory for a credential")
        pointer = ctypes.c_void_p(context)
        own = ctypes.c_uint32(os.geteuid())
        error = self._library.munge_ctx_set(pointer, _OPT_UID_RESTRICTION, own)
        if not error and self._socket is not None:
            path = ctypes.c_char_p(self._socket.encode())
            error = self._library.munge_ctx_set(pointer, _OPT_SOCKET, path)
        if error:
            self._library.munge_ctx_destroy(context)
            raise MungeError(self._library.munge_strerror(error).decode())
        return context

    def _check(self, error: int, context: int) -> None:
        if error:
            text = self._library.munge_ctx_strerror(context) or self._library.munge_strerror(error)
            raise MungeError(text.decode(errors="replace"))
