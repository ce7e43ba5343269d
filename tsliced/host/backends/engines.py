"""How serving engines are paused, parked and brought back over HTTP: vLLM and SGLang.

An engine that answers 200 may have done nothing: whoever asks it looks at the devices afterwards.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Final
from urllib.parse import urlencode

from tsliced.config.backends import EndpointSettings
from tsliced.host.backends.http import HttpClient, HttpError

#: How often SGLang is asked again to flush its cache, which it does when no request is left.
FLUSH_POLL_S: Final = 0.1


class EngineUnfit(Exception):  # noqa: N818 - nothing went wrong: it cannot be parked as it is
    """An engine was not started in a way that lets it be parked; the text says what helps."""


class Engine(ABC):
    """The words of one kind of engine. All raise `HttpError`."""

    #: What most often is the matter when memory is not freed.
    not_freed: str
    #: Whether it may be asked for memory that it has, or to free what it freed. Requests are
    #: carried out in their order, so this makes sure where one is that did not answer the last one.
    may_be_asked_again: bool

    def __init__(self, client: HttpClient, settings: EndpointSettings) -> None:
        self.client = client
        self.settings = settings

    @abstractmethod
    async def pause(self, timeout_s: float) -> None:
        """Let no request be worked on. Raises `EngineUnfit` if it cannot be parked at all."""

    @abstractmethod
    async def unpause(self) -> None:
        """Work on requests again; harmless if it does."""

    @abstractmethod
    async def release(self, timeout_s: float) -> None:
        """Free device memory. It is paused."""

    @abstractmethod
    async def occupy(self, timeout_s: float) -> None:
        """Take device memory again and be as before. It may work on requests at once."""

    @abstractmethod
    async def is_awake(self) -> bool:
        """Return whether the engine itself says that it has its memory and works on requests.

        False is no proof of the contrary.
        """

    async def _post(self, path: str, timeout_s: float, body: object = None) -> None:
        await self.client.request("POST", path, timeout_s=timeout_s, body=body)


class Vllm(Engine):
    """vLLM with ``VLLM_SERVER_DEV_MODE=1`` and ``--enable-sleep-mode``.

    Pausing first, in a request of its own, is what keeps requests out of a sleep: to sleep with
    some in flight ends in illegal memory accesses (vllm-project/vllm#28714).
    """

    not_freed = "was it started with --enable-sleep-mode?"
    may_be_asked_again = True

    async def pause(self, timeout_s: float) -> None:
        """Wait for requests in flight, or abort them."""
        mode = {"mode": self.settings.drain, "clear_cache": "false"}
        try:
            await self._post(f"/pause?{urlencode(mode)}", timeout_s)
        except HttpError as exc:
            if exc.status not in (404, 405):
                raise
            text = "start vLLM with VLLM_SERVER_DEV_MODE=1, in a version that has /pause"
            raise EngineUnfit(f"{exc}; {text}") from exc

    async def unpause(self) -> None:
        """Resume."""
        await self._post("/resume", self.settings.request_timeout_s)

    async def release(self, timeout_s: float) -> None:
        """Sleep at the configured level."""
        how = {"level": self.settings.sleep_level, "mode": self.settings.drain}
        try:
            await self._post(f"/sleep?{urlencode(how)}", timeout_s)
        except HttpError as exc:
            if exc.status == 404:
                raise EngineUnfit(f"{exc}; {self.not_freed}") from exc
            raise
        if await self.is_awake():
            raise HttpError(f"the engine at {self.client.address.url} says that it is not sleeping")

    async def occupy(self, timeout_s: float) -> None:
        """Wake the weights, have them read anew if they were dropped, and only then the cache.

        In this order the cache does not take the memory that weights are read into. Without the
        reload an engine that slept at level 2 answers garbage (vllm-project/vllm#29341).
        """
        await self._post("/wake_up?tags=weights", timeout_s)
        if self.settings.sleep_level == 2:
            await self._post("/collective_rpc", timeout_s, {"method": "reload_weights"})
        await self._post("/wake_up?tags=kv_cache", timeout_s)

    async def is_awake(self) -> bool:
        """Ask for it; one that is only paused is asleep, in later versions."""
        limit_s = self.settings.request_timeout_s
        answer = await self.client.request("GET", "/is_sleeping", timeout_s=limit_s)
        return isinstance(answer, dict) and answer.get("is_sleeping") is False


class Sglang(Engine):
    """SGLang with ``--enable-memory-saver``; it does not say in which state it is."""

    not_freed = "was it started with --enable-memory-saver?"
    may_be_asked_again = False  # its scheduler ends in an assertion

    async def pause(self, timeout_s: float) -> None:
        """Pause, and flush the cache, which works when nothing is being worked on any more.

        Memory that is released while a prefill runs ends in errors for clients.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        mode = "retract" if self.settings.drain == "wait" else "abort"
        await self._post("/pause_generation", timeout_s, {"mode": mode})
        if mode == "abort":
            await self._post("/abort_request", max(0.1, end - loop.time()), {"abort_all": True})
        while True:
            try:
                await self._post("/flush_cache", max(0.1, end - loop.time()), {})
            except HttpError as exc:  # noqa: PERF203 - it is asked again for this very answer
                if exc.status != 400:
                    raise
                if loop.time() >= end:
                    raise HttpError(str(exc), is_timeout=True) from exc
                await asyncio.sleep(FLUSH_POLL_S)
            else:
                return

    async def unpause(self) -> None:
        """Continue."""
        await self._post("/continue_generation", self.settings.request_timeout_s, {})

    async def release(self, timeout_s: float) -> None:
        """Release all kinds of memory. The body is required, also without anything in it."""
        await self._post("/release_memory_occupation", timeout_s, {})

    async def occupy(self, timeout_s: float) -> None:
        """Resume all kinds."""
        await self._post("/resume_memory_occupation", timeout_s, {})

    async def is_awake(self) -> bool:
        """It cannot be asked."""
        return False


KINDS: Final[dict[str, type[Engine]]] = {"vllm": Vllm, "sglang": Sglang}
