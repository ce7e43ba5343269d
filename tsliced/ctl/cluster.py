"""`tslicectl cluster`: what daemons of several hosts know each other by, and whether they do."""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from libtimeslice.protocol import Message
from tsliced.ctl.calls import ask, open_daemon
from tsliced.ctl.failures import BUSY, DONE, FAILED, NOT_FOUND, USAGE, CommandError
from tsliced.ctl.options import Commands, text
from tsliced.ctl.output import NOTHING, duration, print_json, printable, table

_DESCRIPTION = """\
init makes a directory for each host: keys or certificates, and the part of the configuration that
names the hosts and turns links on. It sends nothing anywhere, and the daemon need not run.
check asks the daemon of this host whether each other one is reached, proves who it is, and agrees.
"""
_HOST = re.compile(
    r"(?P<name>[A-Za-z0-9]([A-Za-z0-9._-]{0,62}[A-Za-z0-9])?)(=(?P<address>[^\s,=]{1,255}))?"
)
#: Where the files are on each host: the defaults of the daemon.
_PLACE = "/etc/tsliced/peers"
_DROPIN = "/etc/tsliced/tsliced.toml.d/peers.toml"
_DAYS = "3650"
_OPENSSL_LIMIT_S = 60.0
_AUTHORITY = "authority"
#: Events of several hosts could not be put in order any more.
_CLOCKS_APART_S = 1.0


def add_commands(commands: Commands) -> None:
    """Declares the commands of this module."""
    parser = commands.add(
        "cluster", "set up and check links between the daemons of hosts", description=_DESCRIPTION
    )
    parser.add_argument(
        "what",
        choices=("init", "check"),
        help="init: make keys and configuration; check: see whether this host's daemon has a link "
        "to each other host, and what is wrong if not",
    )
    parser.add_argument(
        "--hosts",
        metavar="NAME[=ADDRESS[:PORT]],...",
        type=hosts,
        help="all hosts, by the names that their daemons have (daemon.host, else hostname)",
    )
    parser.add_argument("--dir", metavar="DIR", type=text, help="where to make the directories")
    parser.add_argument(
        "--auth",
        choices=("tls", "psk", "munge"),
        default="tls",
        help="a certificate for each host (default), one key that all share, or that of munged",
    )
    parser.add_argument("--force", action="store_true", help="write over what is there")
    parser.set_defaults(call=lambda options: _COMMANDS[options.what](options))


def hosts(given: str) -> tuple[str, ...]:
    """Two hosts or more, as ``peers.hosts`` has them."""
    found = tuple(part.strip() for part in given.split(",") if part.strip())
    for part in found:
        if not _HOST.fullmatch(part):
            raise argparse.ArgumentTypeError(
                f"{part!r} names no host: write NAME, NAME=ADDRESS or NAME=ADDRESS:PORT"
            )
    names = [_name(part) for part in found]
    if len(names) < 2:
        raise argparse.ArgumentTypeError("two hosts or more, please")
    if twice := [name for name in names if names.count(name) > 1]:
        raise argparse.ArgumentTypeError(f"{twice[0]} is named twice")
    if _AUTHORITY in names:
        raise argparse.ArgumentTypeError(f"no host can be called {_AUTHORITY} here")
    return found


def init(options: argparse.Namespace) -> int:
    """Makes everything beside the place, and puts it there when it is whole."""
    if options.hosts is None or options.dir is None:
        text = "say which hosts and where: cluster init --hosts n1,n2 --dir DIR"
        raise CommandError(text, code="bad_request", status=USAGE)
    directory, auth = Path(options.dir), str(options.auth)
    entries: tuple[str, ...] = options.hosts
    umask = os.umask(0o077)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not options.force and (there := sorted(item.name for item in directory.iterdir())):
            raise CommandError(
                f"{directory} has {there[0]} in it already; --force writes over it, and then every "
                "host needs its new files",
                code="exists",
            )
        with tempfile.TemporaryDirectory(dir=directory, prefix=".making-") as made:
            _make(Path(made), entries, auth)
            for item in sorted(Path(made).iterdir()):
                target = directory / item.name
                shutil.rmtree(target, ignore_errors=True)
                item.rename(target)
    except OSError as exc:
        text = f"{exc.filename or directory}: {exc.strerror or exc}"
        raise CommandError(text, code="not_written", status=FAILED) from exc
    finally:
        os.umask(umask)
    names = [_name(entry) for entry in entries]
    if options.json:
        print_json({"directory": str(directory), "auth": auth, "hosts": names})
    else:
        print("\n".join(_next_steps(directory, names, auth)))
    return DONE


def check(options: argparse.Namespace) -> int:
    """Prints what is found about each link; fails if one is not as it should be."""
    with open_daemon(options) as daemon:
        peers: list[Message] = ask(daemon, "status")["status"]["peers"]
    if not peers:
        text = "this host's daemon has no links: see [peers] in its configuration"
        raise CommandError(text, code="not_found", status=NOT_FOUND)
    found = [{**peer, "problem": problem_of(peer)} for peer in peers]
    if options.json:
        print_json({"peers": found})
    else:
        rows = [
            [
                peer["host"],
                peer["address"],
                f"{1000 * peer['rtt_s']:.1f} ms" if peer["rtt_s"] is not None else NOTHING,
                f"{peer['clock_ahead_s']:+.3f} s" if peer["clock_ahead_s"] is not None else NOTHING,
                peer["version"] or NOTHING,
                printable(peer["problem"] or "good"),
            ]
            for peer in found
        ]
        header = ["HOST", "ADDRESS", "RTT", "CLOCK", "VERSION", "LINK"]
        print("\n".join(table(header, rows, right=["RTT", "CLOCK"])))
    return FAILED if any(peer["problem"] for peer in found) else DONE


def problem_of(peer: Message) -> str | None:
    """Says what is wrong with a link: it is not there, or clocks are apart."""
    if peer["state"] != "connected":
        return f"{peer['state']} for {duration(peer['since_s'])}: {peer['reason'] or 'no reason'}"
    ahead_s: float | None = peer["clock_ahead_s"]
    if ahead_s is not None and abs(ahead_s) > _CLOCKS_APART_S:
        return f"its clock is {abs(ahead_s):.1f} s {'ahead' if ahead_s > 0 else 'behind'}: see NTP"
    return None


_COMMANDS = {"init": init, "check": check}


def _name(entry: str) -> str:
    return entry.partition("=")[0]


def _make(directory: Path, entries: Sequence[str], auth: str) -> None:
    names = [_name(entry) for entry in entries]
    for name in names:
        (directory / name / ("" if auth == "munge" else "peers")).mkdir(parents=True)
        (directory / name / "peers.toml").write_text(_section(entries, auth))
    if auth == "psk":
        secret = secrets.token_hex(32) + "\n"
        for name in names:
            (directory / name / "peers" / "secret").write_text(secret)
    if auth != "tls":
        return
    authority = directory / _AUTHORITY
    authority.mkdir()
    _make_authority(authority)
    for name in names:
        _make_certificate(authority, directory / name / "peers", name)


def _section(entries: Sequence[str], auth: str) -> str:
    lines = [
        f"# Goes to {_DROPIN} on each host; the same everywhere.",
        "[peers]",
        f"auth = {json.dumps(auth)}",
        f"hosts = {json.dumps(list(entries))}",
    ]
    return "\n".join([*lines, ""])


def _make_authority(directory: Path) -> None:
    config = directory / "openssl.cnf"
    config.write_text(
        "[req]\nprompt = no\ndistinguished_name = name\nx509_extensions = authority\n"
        "[name]\nCN = tsliced cluster\n"
        "[authority]\nbasicConstraints = critical,CA:TRUE,pathlen:0\n"
        "keyUsage = critical,keyCertSign,cRLSign\nsubjectKeyIdentifier = hash\n"
    )
    _new_key(directory / "ca.key")
    _openssl(
        *("req", "-new", "-x509", "-sha256", "-days", _DAYS, "-config", str(config)),
        *("-key", str(directory / "ca.key"), "-out", str(directory / "ca.crt")),
    )
    config.unlink()


def _make_certificate(authority: Path, directory: Path, name: str) -> None:
    config, request = directory / "openssl.cnf", directory / "host.csr"
    config.write_text(
        "[req]\nprompt = no\ndistinguished_name = name\n"
        f"[name]\nCN = {name}\n"
        f"[host]\nbasicConstraints = critical,CA:FALSE\nsubjectAltName = DNS:{name}\n"
        "keyUsage = critical,digitalSignature\nextendedKeyUsage = serverAuth,clientAuth\n"
        "subjectKeyIdentifier = hash\nauthorityKeyIdentifier = keyid\n"
    )
    _new_key(directory / "host.key")
    _openssl(
        *("req", "-new", "-sha256", "-config", str(config)),
        *("-key", str(directory / "host.key"), "-out", str(request)),
    )
    _openssl(
        *("x509", "-req", "-sha256", "-days", _DAYS, "-in", str(request)),
        *("-CA", str(authority / "ca.crt"), "-CAkey", str(authority / "ca.key")),
        *("-set_serial", f"0x{secrets.token_hex(16)}"),
        *("-extfile", str(config), "-extensions", "host", "-out", str(directory / "host.crt")),
    )
    shutil.copy(authority / "ca.crt", directory / "ca.crt")
    config.unlink()
    request.unlink()


def _new_key(path: Path) -> None:
    _openssl(
        *("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"),
        *("-out", str(path)),
    )


def _openssl(*arguments: str) -> None:
    try:
        done = subprocess.run(
            ["openssl", *arguments], capture_output=True, text=True, timeout=_OPENSSL_LIMIT_S
        )
    except FileNotFoundError as exc:
        text = "openssl is not installed; on Debian: apt-get install openssl, or use --auth psk"
        raise CommandError(text, code="no_openssl") from exc
    except subprocess.TimeoutExpired as exc:
        text = f"openssl did not end within {_OPENSSL_LIMIT_S:g} s"
        raise CommandError(text, code="openssl_failed", status=BUSY) from exc
    if done.returncode:
        text = f"openssl {arguments[0]} failed: {done.stderr.strip()}"
        raise CommandError(text, code="openssl_failed")


def _next_steps(directory: Path, names: Sequence[str], auth: str) -> list[str]:
    keys = f"the host's own peers/ to {_PLACE}/, readable by root alone (cp -a), and\n     "
    steps = [
        f"Made {', '.join(f'{directory / name}' for name in names)}. On each host, as root:",
        "",
        f"  1. copy {keys if auth != 'munge' else ''}its peers.toml to {_DROPIN}",
        "  2. tsliced --check-config && systemctl restart tsliced",
        "",
        "Then, on any of them: tslicectl status --all",
    ]
    if auth == "tls":
        keep = directory / _AUTHORITY / "ca.key"
        steps += ["", f"Whoever has {keep} can be any host: keep it off the hosts."]
    return steps
