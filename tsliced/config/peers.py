"""The other hosts that a configuration names: where they are, and what must be the same there."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Final, NamedTuple

from tsliced.config.groups import hosts_of, specs_of
from tsliced.config.reader import Problem
from tsliced.config.settings import Config, GroupSettings, PeerSettings
from tsliced.core.model import HostName

_HOST: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")
#: A name or an IPv4 address, or an IPv6 address in brackets if a port follows.
_ADDRESS: Final = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[^\s:\[\]]{1,253}))(?::(?P<port>\d{1,5}))?"
)
#: Before the digest of a group that a host has for itself.
LOCAL: Final = "="
#: What munged has from its packages, whether or not it runs just now.
MUNGE_KEY: Final = "/etc/munge/munge.key"
MUNGE_SOCKET: Final = "/run/munge/munge.socket.2"
_HOW: Final = "write NAME, NAME=ADDRESS or NAME=ADDRESS:PORT"


class PeerAddress(NamedTuple):
    """Where a daemon listens."""

    address: str
    port: int

    def __str__(self) -> str:
        return f"[{self.address}]:{self.port}" if ":" in self.address else ":".join(map(str, self))

    @property
    def is_loopback(self) -> bool:
        """Whether it is this machine by its text alone; a name may mean anything."""
        with suppress(ValueError):
            return ipaddress.ip_address(self.address).is_loopback
        return self.address == "localhost"


def parse_address(text: str, port: int) -> PeerAddress:
    """Understand ADDRESS or ADDRESS:PORT; raises ValueError."""
    with suppress(ValueError):
        return PeerAddress(str(ipaddress.ip_address(text)), port)
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match["port"] or port) <= 65_535:
        raise ValueError(f"{text!r} is no address: write ADDRESS or ADDRESS:PORT")
    address = match["name"]
    if match["v6"] is not None:
        try:
            address = str(ipaddress.IPv6Address(match["v6"]))
        except ValueError as exc:
            raise ValueError(f"{text!r} is no IPv6 address") from exc
    return PeerAddress(address, int(match["port"] or port))


def parse_host(text: str, port: int) -> tuple[HostName, PeerAddress]:
    """Understand one entry of ``peers.hosts``; raises ValueError."""
    name, is_set, address = text.partition("=")
    if not _HOST.fullmatch(name):
        raise ValueError(f"{text!r} names no host: {_HOW}")
    try:
        return HostName(name), parse_address(address if is_set else name, port)
    except ValueError as exc:
        raise ValueError(f"{text!r}: {exc}; {_HOW}") from exc


def peer_addresses(config: Config) -> dict[HostName, PeerAddress]:
    """Return the hosts that this one has links to, and where they are.

    Those that are listed, and those that share a group with this one; nobody else is let in.
    """
    here, port = HostName(config.daemon.host), config.peers.port
    found = dict(parse_host(text, port) for text in config.peers.hosts)
    for group in config.groups:
        hosts = hosts_of(config, group)
        for host in hosts if here in hosts else ():
            found.setdefault(host, PeerAddress(host, port))
    found.pop(here, None)
    return found


def listen_address(config: Config) -> PeerAddress:
    """Return where this host's daemon listens for others."""
    peers, here = config.peers, HostName(config.daemon.host)
    if peers.listen is not None:
        return parse_address(peers.listen, peers.port)
    listed = dict(parse_host(text, peers.port) for text in peers.hosts)
    return listed.get(here, PeerAddress(here, peers.port))


def shared_groups(config: Config, other: HostName) -> dict[str, str]:
    """Return the groups that this host shares with another, and digests of what they are.

    Both hosts must come to the same, or they would give the same devices to two jobs.
    """
    here = HostName(config.daemon.host)
    return {
        group.name: _digest(config, group)
        for group in config.groups
        if {here, other} <= set(hosts_of(config, group))
    }


def known_groups(config: Config, other: HostName) -> dict[str, str]:
    """Return all other groups, with digests; ``=`` before that of a group that is here alone.

    Two hosts may each have a group of a name for themselves. But where one of them knows it to be
    elsewhere it is the same group, whose arbiter and order both must see alike: those who lease
    several groups would wait for each other in a circle otherwise.
    """
    here = HostName(config.daemon.host)
    known: dict[str, str] = {}
    for group in config.groups:
        hosts = hosts_of(config, group)
        if not {here, other} <= set(hosts):
            mark = LOCAL if hosts == (here,) else ""
            known[group.name] = mark + _digest(config, group)
    return known


def _digest(config: Config, group: GroupSettings) -> str:
    here, hosts = config.daemon.host, hosts_of(config, group)
    devices = sorted(json.dumps([s.host or here, s.indices, s.uuid]) for s in specs_of(group))
    who = [sorted(group.users), sorted(group.accounts)]
    # The first host arbitrates.
    text = json.dumps([hosts, devices, who, group.max_hold_s, group.order])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def with_usual_auth(peers: PeerSettings) -> PeerSettings:
    """Return links that know each other by MUNGE if nothing else is said, where it is set up.

    All nodes of a Slurm cluster have its key already.
    """
    signs = (peers.munge_socket or MUNGE_SOCKET, MUNGE_KEY)
    if peers.auth is None and peers.hosts and any(map(os.path.exists, signs)):
        return replace(peers, auth="munge")
    return peers


def check_peers(config: Config) -> Iterator[Problem]:
    """Yield what is wrong with ``[peers]`` beyond single values."""
    peers = config.peers
    mistakes = list(_mistakes_in_addresses(config))
    yield from mistakes
    if peers.auth is None and (peers.hosts or peers.listen):
        text = 'say how hosts prove who they are: "tls", "psk" or "munge" (see tslicectl cluster)'
        key = "hosts" if peers.hosts else "listen"
        yield Problem(config.origin("peers", key), "peers.auth", text)
    for less, more in (
        ("heartbeat_s", "suspect_s"),
        ("suspect_s", "lost_s"),
        ("reconnect_min_s", "reconnect_max_s"),
    ):
        if getattr(peers, less) >= getattr(peers, more):
            text = (
                f"{getattr(peers, less):g} s must be less than {more}, {getattr(peers, more):g} s"
            )
            key = less if f"peers.{less}" in config.origins else more
            yield Problem(config.origin("peers", key), f"peers.{less}", text)
    if peers.auth == "none" and not peers.insecure and not mistakes:
        beyond = [a for a in (*_all_addresses(config),) if not a.is_loopback]
        if beyond:
            text = (
                f'"none" lets anybody in who can reach {beyond[0]}: use "tls", "psk" or "munge", '
                "or addresses on loopback, or set insecure = true"
            )
            yield Problem(config.origin("peers", "auth"), "peers.auth", text)


def _all_addresses(config: Config) -> Iterator[PeerAddress]:
    others = peer_addresses(config)
    if others:
        yield listen_address(config)
    yield from others.values()


def _mistakes_in_addresses(config: Config) -> Iterator[Problem]:
    peers = config.peers
    seen: set[str] = set()
    for text in peers.hosts:
        try:
            host, _ = parse_host(text, peers.port)
        except ValueError as exc:
            yield Problem(config.origin("peers", "hosts"), "peers.hosts", str(exc))
            continue
        if host in seen:
            yield Problem(config.origin("peers", "hosts"), "peers.hosts", f"{host} is listed twice")
        seen.add(host)
    if peers.listen is not None:
        try:
            parse_address(peers.listen, peers.port)
        except ValueError as exc:
            yield Problem(config.origin("peers", "listen"), "peers.listen", str(exc))


def check_hosts(config: Config) -> Iterator[Problem]:
    """Yield what is wrong with groups that other hosts have devices of."""
    here = HostName(config.daemon.host)
    linked = None if list(_mistakes_in_addresses(config)) else peer_addresses(config)
    for group in config.groups:
        others = [host for host in hosts_of(config, group) if host != here]
        if not others:
            continue
        origin = config.origin("groups", group.name, "devices")
        key = f"groups.{group.name}.devices"
        for spec in specs_of(group):
            if spec.host is None:
                text = f"{spec.text!r} names no host, and the group has devices on {others[0]}"
                yield Problem(origin, key, f"{text}: write {here}:{spec.text}")
        if config.peers.auth is None:
            text = f"this is {here}, and devices of {', '.join(others)} need links to the daemons"
            yield Problem(origin, key, f"{text} there: set [peers] up (see tslicectl cluster)")
        elif linked is not None and (unlinked := [host for host in others if host not in linked]):
            text = f"there is no link to {', '.join(unlinked)}: list them in peers.hosts"
            yield Problem(origin, key, text)
