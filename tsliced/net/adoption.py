"""After a restart: the connections that the service manager kept say which clients are there."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping

from tsliced.core.events import SessionDisconnected, SessionResumed
from tsliced.core.model import ProcessId, SessionId
from tsliced.driver import Driver
from tsliced.net.client import Client
from tsliced.net.connection import peer_of
from tsliced.net.survivors import Survivor, Vault, end, session_of


def adopt(
    kept: Iterable[tuple[str, socket.socket]],
    clients: Mapping[SessionId, Client],
    driver: Driver,
    vault: Vault,
) -> int:
    """Know by their old connections which clients are there; return how many are.

    One that is not among them left, or was never kept: it has its grace to come back.
    """
    adopted = 0
    for name, sock in kept:
        client = clients.get(session_of(name))
        if client is None or _process_of(sock) != client.peer.process:
            vault.drop(name)
            end(sock)
            sock.close()
            continue

        def on_gone(survivor: Survivor, client: Client = client) -> None:
            client.survivors.remove(survivor)
            if not client.survivors:
                driver.post(SessionDisconnected(session=client.session))

        client.survivors.append(Survivor(name, sock, vault, on_gone))
        driver.post(SessionResumed(session=client.session))
        adopted += 1
    return adopted


def _process_of(sock: socket.socket) -> ProcessId | None:
    try:
        peer = peer_of(sock)
    except OSError:
        # It cannot be found out now; who is there comes back by itself.
        return None
    return peer.process if peer is not None else None
