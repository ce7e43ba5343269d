"""Starting engines for tests, and telling them what to do wrong."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from harness import Host, Rank

PROGRAM = "../endpoints/engine_rank.py"


def free_port() -> int:
    """Returns a port on which nobody listens just now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class EngineRank:
    """A running engine, and the file of what it does wrong."""

    def __init__(
        self,
        host: Host,
        kind: str = "vllm",
        job: str = "",
        *,
        endpoint: str | None = None,
        others: str = "",
        arguments: tuple[str, ...] = (),
        **environment: Any,
    ) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        name = f"{kind}+{self.url}"
        self.faults = host.directory / f"engine-faults-{job}-{self.url.rpartition(':')[2]}"
        self.rank: Rank = host.rank(
            job,
            program=PROGRAM,
            arguments=arguments,
            ENGINE=name,
            ENGINE_FAULTS=str(self.faults),
            TSLICE_ENDPOINT=f"{name} {others}" if endpoint is None else endpoint,
            **environment,
        )

    def serve(self, weights: int = 24, cache: int = 8) -> str:
        """Lets it load and listen; returns the digest of its weights."""
        self.rank.do("serve", weights=weights, cache=cache)
        digest: str = self.rank.do("digest")
        return digest

    def fault(self, *lines: str) -> None:
        """Tells it what to do wrong from now on."""
        new = Path(f"{self.faults}.new")
        new.write_text("".join(f"{line}\n" for line in lines))
        os.rename(new, self.faults)
