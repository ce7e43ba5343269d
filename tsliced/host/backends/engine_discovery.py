"""Which serving engines a process belongs to, and whether they can be parked.

A process, or its nearest ancestor of the same user that does, says it in its environment; so the
workers of an engine need nothing of their own. Else the configuration says it for their job.

What an environment says is a user's word, and a daemon that runs as root must not carry it to
others' engines: such an engine has to be reached over loopback, and whoever listens there has to be
the user's own. The credentials of the configuration go to engines of the configuration only.
"""

from __future__ import annotations

import ipaddress
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tsliced.config.backends import EndpointSettings, EngineAddress, parse_engine_untrusted
from tsliced.core.model import JobKey, ProcessId
from tsliced.host.backends.base import BackendError
from tsliced.host.backends.engines import EngineUnfit
from tsliced.host.processes import ancestors, environment, uid_of
from tsliced.host.procfs import PROC, read_permitted_file

ENDPOINT: Final = "TSLICE_ENDPOINT"
TOKEN: Final = "TSLICE_ENDPOINT_TOKEN"
#: A process may belong to several engines, though hardly ever does.
MAX_ENGINES: Final = 16
#: State of a listening socket in /proc/net/tcp.
_LISTENING: Final = "0A"


class Found(NamedTuple):
    """An engine, and the token that it wants."""

    address: EngineAddress
    token: str | None

    def __repr__(self) -> str:
        return f"Found({self.address.url})"


class Discovery:
    """Finds engines. All methods read small files, and may be called in a thread."""

    def __init__(self, settings: EndpointSettings, *, proc: str = PROC) -> None:
        self._settings = settings
        self._proc = proc
        self._tokens = _read_tokens(settings.credentials_file)

    def find(self, process: ProcessId, job: JobKey | None) -> tuple[Found, ...]:
        """Return the engines that a process is said to belong to; maybe none.

        Raises `EngineUnfit` for one that may not be used.
        """
        uid = uid_of(process.pid, proc=self._proc)
        for values in self._environments(process.pid, uid):
            if said := values.get(ENDPOINT):
                return tuple(self._parse(said, values.get(TOKEN), uid))
        address = self._settings.engine_of(job.id) if job is not None else None
        if address is None:
            return ()
        return (Found(address, self._tokens.get(address.url)),)

    def objection(self, process: ProcessId) -> str | None:
        """Say why an engine could be parked but would not come back whole, if so."""
        uid = uid_of(process.pid, proc=self._proc)
        for values in self._environments(process.pid, uid):
            for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
                if "expandable_segments:true" in values.get(name, "").lower():
                    return f"{name} has expandable_segments, which engines cannot release"
        if not self._settings.allow_lora:
            for pid in self._family(process.pid, uid):
                words = (read_permitted_file(f"{self._proc}/{pid}/cmdline") or b"").split(b"\0")
                if b"--enable-lora" in words:
                    return (
                        "its engine has LoRA adapters (--enable-lora), and some versions of vLLM "
                        "corrupt them in their sleep; backends.endpoint.allow_lora lets it sleep"
                    )
        return None

    def _parse(self, said: str, token: str | None, uid: int | None) -> Iterator[Found]:
        for text in said.replace(",", " ").split()[:MAX_ENGINES]:
            try:
                address = parse_engine_untrusted(text)
            except ValueError as exc:
                raise EngineUnfit(f"{ENDPOINT}: {exc}") from None
            if not _is_loopback(address.host):
                raise EngineUnfit(
                    f"{ENDPOINT}: {address.url} is not on this host (127.0.0.1, [::1]); others' "
                    "engines are named in backends.endpoint.engines"
                )
            if (listeners := self._listeners(address.port)) != {uid}:
                whose = "nobody listens" if not listeners else "another user listens"
                raise EngineUnfit(f"{ENDPOINT}: {whose} at {address.url}")
            yield Found(address, token)

    def _listeners(self, port: int) -> set[int]:
        """Return the users who listen on a TCP port of this host."""
        found: set[int] = set()
        for name in ("tcp", "tcp6"):
            text = (read_permitted_file(f"{self._proc}/net/{name}") or b"").decode()
            for line in text.splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTENING and int(words[1].rpartition(":")[2], 16) == port:
                    found.add(int(words[7]))
        return found

    def _environments(self, pid: int, uid: int | None) -> Iterator[dict[str, str]]:
        for member in self._family(pid, uid):
            yield environment(member, proc=self._proc) or {}

    def _family(self, pid: int, uid: int | None) -> Iterator[int]:
        """Yield a process, then those of its ancestors that have the same user."""
        yield pid
        for ancestor in ancestors(pid, proc=self._proc):
            if uid_of(ancestor.pid, proc=self._proc) == uid:
                yield ancestor.pid


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read_tokens(path: str | None) -> dict[str, str]:
    """Return tokens by URL. Raises `BackendError`, which never shows a line of the file."""
    if path is None:
        return {}
    try:
        found = os.stat(path)
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise BackendError(f"{path} cannot be read: {type(exc).__name__}") from None
    if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO) or found.st_uid not in (0, os.geteuid()):
        raise BackendError(f"{path} is open to others, or theirs: chmod 600 and chown it")
    tokens: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            url, token = words
            tokens[parse_engine_untrusted(url).url] = token
        except ValueError:
            raise BackendError(
                f"{path}:{number}: a line is KIND+URL and a token, with a blank between"
            ) from None
    return tokens
