"""Slurm's accounting for a test's site: a real slurmdbd, and the database that it needs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from harness import LIMIT_S, until

if TYPE_CHECKING:
    from slurm_site import Site

PROGRAMS = ("slurmdbd", "mariadbd")
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
#: How Debian's database makes its own tables.
TABLES = Path("/usr/share/mysql")

CONF = """\
AuthType=auth/munge
AuthInfo=socket={root}/munge/s
DbdHost={host}
DbdAddr={address}
SlurmUser=root
PidFile={root}/slurmdbd.pid
LogFile={root}/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm
"""
#: Without a network, and small: it is thrown away.
OPTIONS = (
    "--no-defaults",
    "--user=root",
    "--skip-networking",
    "--lc-messages-dir=/usr/share/mysql",
    "--innodb-buffer-pool-size=16M",
    "--innodb-log-file-size=4M",
    "--innodb-flush-log-at-trx-commit=0",
)


def why_not() -> str | None:
    """Returns why there can be no accounting here, if so."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if missing:
        packages = "slurmdbd mariadb-server-core"
        return f"{', '.join(missing)} missing (on Debian: apt-get install {packages})"
    return None


class Accounting:
    """The two programs; they end with the site."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._root = site.root
        self._address = site.network.addresses[site.names[0]]

    def lines(self) -> list[str]:
        """Returns what stands of it in slurm.conf."""
        return [
            "AccountingStorageType=accounting_storage/slurmdbd",
            f"AccountingStorageHost={self._address}",
            # With MUNGE it is no password, but where munged is.
            f"AccountingStoragePass={self._root}/munge/s",
            "AccountingStorageTRES=gres/tslice",
            "AccountingStorageEnforce=associations,limits",
        ]

    def start(self) -> None:
        """Starts both, with nothing in them but the cluster."""
        socket = self._start_database()
        host = os.uname().nodename.partition(".")[0]
        conf = self._root / "slurmdbd.conf"
        conf.touch(mode=0o600)
        conf.write_text(CONF.format(root=self._root, host=host, address=self._address))
        self._site.start("slurmdbd", "-D", MYSQL_UNIX_PORT=str(socket))
        until(self._answers, "slurmdbd answers")
        self.manage("add", "cluster", "lab")

    def manage(self, *arguments: str) -> str:
        """Changes or shows what is kept, as root, and returns what is printed."""
        command = ("sacctmgr", "--immediate", "--noheader", "--parsable2", *arguments)
        return self._site.run(*command).stdout

    def _answers(self) -> bool:
        return self._site.run("sacctmgr", "show", "cluster", check=False).returncode == 0

    def _start_database(self) -> Path:
        data, socket = self._root / "database", self._root / "database.s"
        data.mkdir()
        options = [*OPTIONS, f"--datadir={data}", f"--log-error={self._root}/database.log"]
        names = ("mysql_system_tables.sql", "mysql_system_tables_data.sql")
        texts = [(TABLES / name).read_text() for name in names]
        made = subprocess.run(
            [*self._site.enter(), "mariadbd", *options, "--bootstrap"],
            input="\n".join(["create database mysql;", "use mysql;", *texts]),
            env=self._site.environment(),
            text=True,
            capture_output=True,
            timeout=LIMIT_S,
        )
        assert made.returncode == 0, made.stderr
        # Whoever reaches the socket may do everything: it is in a directory of this site.
        self._site.start("mariadbd", *options, "--skip-grant-tables", f"--socket={socket}")
        until(socket.exists, "the database serves")
        return socket
