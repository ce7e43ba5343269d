"""How many file descriptors this process may have."""

from __future__ import annotations

import resource


def raise_limit() -> int:
    """Raise the limit as far as this process may, and return it.

    The low limit that processes begin with is there for programs that use select(2).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
