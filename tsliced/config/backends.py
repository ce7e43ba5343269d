"""``[backends.NAME]``: what snapshot backends are told, and how a serving engine is named.

The tables of this package's own backends are dataclasses here. A backend that another package
registers gets its table as it is, and checks it itself.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.metadata import entry_points
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from tsliced.config.reader import ruled

#: Under this name packages register backends.
ENTRY_POINTS: Final = "tsliced.backends"

ENGINE_KINDS: Final = ("vllm", "sglang")
_PATH_RULE: Final = {"pattern": r"/[^\0]*", "meaning": "an absolute path"}
#: What may stand in braces in the arguments of a configured program.
_PLACEHOLDER: Final = re.compile(r"\{(\w*)\}")
PLACEHOLDERS: Final = ("pid", "job", "uid", "timeout_s")


class EngineAddress(NamedTuple):
    """Where the control interface of a serving engine is, and which one it speaks."""

    #: One of `ENGINE_KINDS`.
    kind: str
    #: ``http://HOST:PORT`` or https, perhaps with a path; nothing secret, no slash at the end.
    url: str
    host: str
    port: int

    @property
    def is_tls(self) -> bool:
        """Whether it is spoken to over TLS."""
        return self.url.startswith("https:")


def parse_engine_untrusted(text: str) -> EngineAddress:
    """Return the engine that ``vllm+http://HOST:PORT`` names.

    Raises ValueError, which never repeats credentials that somebody wrote into the URL.
    """
    kind, plus, url = text.partition("+")
    if not plus or kind not in ENGINE_KINDS:
        raise ValueError("an engine is named as vllm+http://HOST:PORT or sglang+http://HOST:PORT")
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        host = parts.hostname
    except ValueError as exc:
        raise ValueError(f"an engine's URL cannot be read: {type(exc).__name__}") from None
    if "@" in parts.netloc:
        raise ValueError(
            f"the URL of the engine at {host} has credentials in it: they belong into "
            "backends.endpoint.credentials_file, or into TSLICE_ENDPOINT_TOKEN"
        )
    odd = parts.query or parts.fragment or re.search(r"[\s\0-\x1f\x7f]", url)
    if parts.scheme not in ("http", "https") or not host or odd:
        raise ValueError("an engine's URL has a scheme (http, https), a host, a port and a path")
    shown = f"[{host}]" if ":" in host else host
    return EngineAddress(
        kind, f"{parts.scheme}://{shown}:{port}{parts.path.rstrip('/')}", host, port
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSettings:
    """``[backends.endpoint]``: engines that park themselves when they are asked over HTTP."""

    #: ``JOB=KIND+URL``, for jobs whose processes do not say it in their environment. JOB is a job's
    #: id, with ``*`` and ``?`` if need be; the first that fits counts.
    engines: tuple[str, ...] = ()
    #: Lines of KIND+URL and the token that it wants. Readable by the daemon's user alone.
    credentials_file: str | None = ruled(None, **_PATH_RULE)
    #: Before an engine parks, its requests are waited for, or aborted.
    drain: str = ruled("wait", choices=("wait", "abort"))
    #: vLLM's: 1 keeps the weights in host memory, 2 drops them and reads them anew.
    sleep_level: int = ruled(1, least=1, most=2)
    #: Limit of a request, and what it has beyond that for each byte that it moves.
    request_timeout_s: float = 30.0
    request_bytes_per_s: float = 500e6
    #: An engine that answered has so long until NVML shows it, ...
    settle_s: float = 10.0
    #: ... and must have freed this share of what it had.
    min_freed_ratio: float = ruled(0.5, least=0.01, most=1)
    #: Park engines with LoRA adapters, which some versions of vLLM bring back corrupted.
    allow_lora: bool = False

    def engine_of(self, job: str) -> EngineAddress | None:
        """Return the engine that is configured for a job's id."""
        for entry in self.engines:
            pattern, _, engine = entry.partition("=")
            if fnmatchcase(job, pattern):
                return parse_engine_untrusted(engine)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class CliSettings:
    """``[backends.cli]``: NVIDIA's cuda-checkpoint utility, for drivers 550 to 569."""

    #: Its path, or a name that is looked up on PATH.
    program: str = ruled("cuda-checkpoint", pattern=r"[^\0]+", meaning="a program")
    #: ``toggle``: all that driver 550 knows, one process for each job. ``actions``: single steps,
    #: where utility and driver know them (570).
    calls: str = ruled("toggle", choices=("toggle", "actions"))


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSettings:
    """``[backends.command]``: programs that somebody else wrote, with their arguments.

    ``{pid}``, ``{job}``, ``{uid}`` and, for a freeze, ``{timeout_s}`` are filled in.
    """

    #: Left out: a process is called frozen, and goes on until it is snapshotted.
    freeze: tuple[str, ...] = ()
    snapshot: tuple[str, ...] = ()
    restore: tuple[str, ...] = ()
    #: Left out: what is restored runs.
    thaw: tuple[str, ...] = ()
    #: Prints running, frozen, parked or failed: what a program did is believed when this says so.
    state: tuple[str, ...] = ()
    #: Whether NVML lists the processes and their memory; otherwise ranks have to register.
    seen_by_nvml: bool = False
    #: For `state`.
    state_timeout_s: float = 20.0
    #: For all but `freeze`: after it a program is ended. Left out: never, which is safe where one
    #: that is cut off leaves nobody knows what behind.
    command_timeout_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSettings:
    """``[backends]``, all of it."""

    endpoint: EndpointSettings = field(default_factory=EndpointSettings)
    cli: CliSettings = field(default_factory=CliSettings)
    command: CommandSettings = field(default_factory=CommandSettings)
    #: Tables of backends that other packages registered, by name.
    others: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


#: The tables that are a dataclass each.
OWN_TABLES: Final[Mapping[str, type[Any]]] = {
    "endpoint": EndpointSettings,
    "cli": CliSettings,
    "command": CommandSettings,
}


def registered_backends() -> list[str]:
    """Return the names of the backends that installed packages registered."""
    return sorted({entry.name for entry in entry_points(group=ENTRY_POINTS)})


class Mistake(NamedTuple):
    """What is wrong with a value: the rest of its key, and a text."""

    key: str
    text: str


def check_backends(settings: BackendSettings, chosen: Collection[str]) -> Iterator[Mistake]:
    """Yield what single values cannot show; `chosen` are the backends that are used."""
    for entry in settings.endpoint.engines:
        pattern, equals, engine = entry.partition("=")
        if not equals or not pattern:
            yield Mistake("endpoint.engines", "an entry is JOB=KIND+URL")
            continue
        try:
            parse_engine_untrusted(engine)
        except ValueError as exc:
            yield Mistake("endpoint.engines", f"for {pattern!r}: {exc}")
    for name in ("freeze", "snapshot", "restore", "thaw", "state"):
        yield from _check_program(name, getattr(settings.command, name))
        is_needed = name in ("snapshot", "restore", "state")
        if "command" in chosen and is_needed and not getattr(settings.command, name):
            yield Mistake(f"command.{name}", 'the backend "command" needs this program')

    if bool(settings.command.freeze) != bool(settings.command.thaw):
        yield Mistake("command.freeze", "freeze and thaw are given both, or neither")


def _check_program(name: str, words: tuple[str, ...]) -> Iterator[Mistake]:
    if words and not words[0].startswith("/"):
        yield Mistake(f"command.{name}", f"{words[0]!r} is no absolute path of a program")
    for word in words:
        for found in _PLACEHOLDER.findall(word):
            if found not in PLACEHOLDERS or (found == "timeout_s" and name != "freeze"):
                known = ", ".join(f"{{{known}}}" for known in PLACEHOLDERS)
                text = f"{{{found}}} is not known here; known are {known}, the last for freeze"
                yield Mistake(f"command.{name}", text)


def fill_in(words: tuple[str, ...], values: Mapping[str, str]) -> list[str]:
    """Return a program's words with values in the place of what stands in braces."""
    return [_PLACEHOLDER.sub(lambda found: values[found.group(1)], word) for word in words]
