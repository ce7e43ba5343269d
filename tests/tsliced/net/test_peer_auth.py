"""Keys and certificates: what is good for a host, and what a proof proves."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from tsliced.config import PeerSettings
from tsliced.ctl.__main__ import main as tslicectl
from tsliced.net.peer_auth import Exchange, PeerAuthError, load_credentials
from tsliced.net.peer_messages import PeerRefused

EXCHANGE = Exchange(
    secret=b"s" * 32, dialer="n1", acceptor="n2", dialer_nonce=b"1" * 32, acceptor_nonce=b"2" * 32
)
DERIVED: tuple[Callable[[Exchange], bytes], ...] = (
    Exchange.proof_of_acceptor,
    Exchange.proof_of_dialer,
    Exchange.key_of_dialer,
    Exchange.key_of_acceptor,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cluster")
    for auth in ("tls", "psk"):
        arguments = ["--hosts", "n1,n2=10.0.0.2:7000", "--dir", str(directory / auth)]
        assert tslicectl(["cluster", "init", *arguments, "--auth", auth]) == 0
    return directory


def settings(made: Path, auth: str, host: str = "n1") -> PeerSettings:
    place = made / auth / host / "peers"
    return PeerSettings(
        auth=auth,
        ca_file=str(place / "ca.crt"),
        cert_file=str(place / "host.crt"),
        key_file=str(place / "host.key"),
        secret_file=str(place / "secret"),
    )


@pytest.mark.parametrize("change", [field.name for field in fields(Exchange)])
def test_a_proof_fits_one_key_one_pair_of_hosts_and_one_connection(change: str) -> None:
    value = getattr(EXCHANGE, change)
    changed: dict[str, Any] = {change: b"x" * 32 if isinstance(value, bytes) else "n3"}
    other = replace(EXCHANGE, **changed)
    for derive in DERIVED:
        assert derive(EXCHANGE) == derive(replace(EXCHANGE))
        assert derive(EXCHANGE) != derive(other)


def test_no_proof_or_key_stands_for_another_and_none_fits_the_other_way_round() -> None:
    back = replace(
        EXCHANGE, dialer="n2", acceptor="n1", dialer_nonce=b"2" * 32, acceptor_nonce=b"1" * 32
    )
    values = [derive(exchange) for derive in DERIVED for exchange in (EXCHANGE, back)]
    assert len(set(values)) == len(values)
    with pytest.raises(PeerRefused) as caught:
        EXCHANGE.check(EXCHANGE.proof_of_acceptor(), EXCHANGE.proof_of_dialer(), "n1")
    assert caught.value.code == "auth"


def test_names_do_not_run_into_each_other() -> None:
    one = replace(EXCHANGE, dialer="n1n", acceptor="2")
    other = replace(EXCHANGE, dialer="n1", acceptor="n2")
    assert one.proof_of_dialer() != other.proof_of_dialer()


@pytest.mark.parametrize("auth", ["tls", "psk"])
@pytest.mark.parametrize("host", ["n1", "n2"])
def test_what_cluster_init_makes_is_good_for_its_host(made: Path, auth: str, host: str) -> None:
    assert load_credentials(settings(made, auth, host), host).auth == auth


def test_a_certificate_of_another_host_or_authority_is_refused(made: Path, tmp_path: Path) -> None:
    good = settings(made, "tls")
    with pytest.raises(PeerAuthError, match="is a certificate for n1, and this host is n2"):
        load_credentials(good, "n2")
    arguments = ["--hosts", "n1,n2", "--dir", str(tmp_path / "x")]
    assert tslicectl(["cluster", "init", *arguments]) == 0
    foreign = str(tmp_path / "x" / "n1" / "peers" / "ca.crt")
    with pytest.raises(PeerAuthError, match="would be refused by other hosts"):
        load_credentials(replace(good, ca_file=foreign), "n1")
    other = settings(made, "tls", "n2")
    with pytest.raises(PeerAuthError, match="are no certificate with its key"):
        load_credentials(replace(good, key_file=other.key_file), "n1")
    with pytest.raises(PeerAuthError, match="is no certificate of an authority"):
        load_credentials(replace(good, ca_file=good.key_file), "n1")


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o666, 0o644])
def test_a_key_that_others_can_read_or_change_is_refused(
    made: Path, tmp_path: Path, mode: int
) -> None:
    copy = tmp_path / "secret"
    copy.write_bytes((made / "psk" / "n1" / "peers" / "secret").read_bytes())
    copy.chmod(0o640)
    assert load_credentials(PeerSettings(auth="psk", secret_file=str(copy)), "n1").secret
    copy.chmod(mode)
    with pytest.raises(PeerAuthError, match="chmod 600"):
        load_credentials(PeerSettings(auth="psk", secret_file=str(copy)), "n1")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")
def test_a_key_of_another_user_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * 40)
    secret.chmod(0o600)
    os.chown(secret, 65534, 65534)
    with pytest.raises(PeerAuthError, match="chown"):
        load_credentials(PeerSettings(auth="psk", secret_file=str(secret)), "n1")


@pytest.mark.parametrize("content", [b"", b"short\n", b"x" * 31 + b"\n\n", b"x" * 5000])
def test_a_key_that_is_too_short_or_no_key_is_refused(tmp_path: Path, content: bytes) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(content)
    secret.chmod(0o600)
    with pytest.raises(PeerAuthError, match="a key has 32 to 4096"):
        load_credentials(PeerSettings(auth="psk", secret_file=str(secret)), "n1")


@pytest.mark.parametrize(("auth", "file"), [("psk", "secret_file"), ("tls", "key_file")])
def test_a_file_that_is_missing_is_named(made: Path, auth: str, file: str) -> None:
    changed: dict[str, Any] = {file: "/nowhere"}
    with pytest.raises(PeerAuthError, match="/nowhere cannot be read: No such file"):
        load_credentials(replace(settings(made, auth), **changed), "n1")
