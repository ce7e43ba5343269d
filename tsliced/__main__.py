"""``tsliced``: reads the configuration, then runs the daemon in the foreground."""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

#: From sysexits(3). systemd does not restart a service that ended with EX_CONFIG.
EX_USAGE, EX_UNAVAILABLE, EX_SOFTWARE, EX_CANTCREAT, EX_CONFIG = 64, 69, 70, 73, 78
#: After a start that failed, under a service manager; StartLimitBurst= of the unit allows for it.
RETRY_PAUSE_S = 2.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the daemon; return the exit status."""
    if sys.version_info < (3, 11):
        print("tsliced needs Python 3.11 or later", file=sys.stderr)
        return EX_UNAVAILABLE
    options = _parser().parse_args(arguments)
    from tsliced.config import (
        DEFAULT_PATH,
        ConfigError,
        ConfigSource,
        describe,
        user_config,
        user_defaults,
    )

    usual = user_config(os.environ) if options.user else DEFAULT_PATH
    defaults = user_defaults(os.environ) if options.user else None
    source = ConfigSource(
        path=Path(options.config or usual),
        optional=options.config is None,
        defaults=defaults,
    )
    try:
        config = source.read()
    except ConfigError as exc:
        print(exc, file=sys.stderr)
        return EX_CONFIG
    for warning in config.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if options.print_config:
        print(describe(config), end="")
        return 0
    if options.check_config:
        print(f"{source.path}: good", file=sys.stderr)
        return 0
    return _serve(config, source, tell_socket=options.user)


def _serve(config: object, source: object, *, tell_socket: bool) -> int:
    # Imported late: checking a configuration must work where the daemon's packages are missing.
    from tsliced.config import Config, ConfigError, ConfigSource
    from tsliced.daemon import BrokenStateError, Daemon
    from tsliced.host.backends.base import BackendError
    from tsliced.host.devices import DevicesUnavailable
    from tsliced.host.journal import JournalCode, JournalError
    from tsliced.log import Log
    from tsliced.net.listening import ListenError
    from tsliced.net.peer_auth import PeerAuthError
    from tsliced.sdnotify import Notifier

    assert isinstance(config, Config)
    assert isinstance(source, ConfigSource)
    os.umask(0o077)
    # What the watchdog ends tells where it stood.
    faulthandler.enable()
    daemon = Daemon(
        config=config, log=Log(config.daemon.log_level), notifier=Notifier(), source=source
    )
    if tell_socket:
        export = f"export TSLICE_SOCKET={shlex.quote(config.daemon.socket)}"
        daemon.on_serving = lambda: print(export, flush=True)
    failures: dict[type[Exception], int] = {
        ConfigError: EX_CONFIG,
        BackendError: EX_CONFIG,
        PeerAuthError: EX_CONFIG,
        DevicesUnavailable: EX_UNAVAILABLE,
        JournalError: EX_UNAVAILABLE,
        ListenError: EX_CANTCREAT,
    }
    try:
        with asyncio.Runner(loop_factory=_loop_factory(config.daemon.loop)) as runner:
            runner.run(daemon.run())
    except tuple(failures) as exc:
        print(f"tsliced: {exc}", file=sys.stderr)
        daemon.notifier.status(f"cannot start: {' '.join(str(exc).split())}")
        status = failures[type(exc)]
        if isinstance(exc, JournalError) and exc.code is JournalCode.NEWER:
            status = EX_CONFIG  # trying again would not help
        if daemon.notifier.enabled and status != EX_CONFIG:
            # The service manager tries again at once: give what is missing some time to come.
            time.sleep(RETRY_PAUSE_S)
        return status
    except BrokenStateError as exc:
        # Its story is in the log; the next daemon starts from the journal.
        print(f"tsliced: {exc}", file=sys.stderr)
        return EX_SOFTWARE
    return 0


def _loop_factory(choice: str):  # type: ignore[no-untyped-def]  # uvloop has no types
    if choice == "asyncio":
        return None
    try:
        import uvloop
    except ImportError:
        if choice == "uvloop":
            raise
        return None
    return uvloop.new_event_loop


def _parser() -> argparse.ArgumentParser:
    from libtimeslice import __version__

    parser = argparse.ArgumentParser(
        prog="tsliced", description="Shares this host's GPUs between jobs, a phase at a time."
    )
    parser.add_argument(
        "--config", metavar="FILE", help="configuration (default: /etc/tsliced/tsliced.toml)"
    )
    parser.add_argument(
        "--user",
        action="store_true",
        help="serve your own jobs, with your own rights, on the devices of CUDA_VISIBLE_DEVICES; "
        "configuration: ~/.config/tsliced/tsliced.toml, if there is one",
    )
    parser.add_argument(
        "--check-config", action="store_true", help="check the configuration and end"
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print the effective configuration and end"
    )
    parser.add_argument("--version", action="version", version=f"tsliced {__version__}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
