"""Today's daemon with the clients of earlier versions: what they sent, it serves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from golden import Golden, Message, all_frames, frame_of, spoken, versions
from harness import Host, until
from raw_client import RawClient

#: What says that the daemon did not understand.
NOT_UNDERSTOOD = {"bad_frame", "bad_request", "unknown_request", "unsupported_version", "internal"}


@pytest.fixture(scope="module")
def host(softcuda_build: Path) -> Iterator[Host]:
    host = Host(softcuda_build)
    host.start_daemon()
    yield host
    host.close()


class OldClient(RawClient):
    """Sends kept frames; only what the daemon alone can know is put in."""

    def __init__(self, host: Host, version: str) -> None:
        super().__init__(host.socket)
        self.kept = spoken(version, "client")

    def tell(self, name: str, **told: object) -> int:
        """Sends a frame with what the daemon told put in; returns the id of the request."""
        message = {**self.kept[name], **told}
        self.send_bytes(frame_of(message))
        return int(message.get("id", 0))

    def ask_kept(self, name: str, **told: object) -> Message:
        return self.answer_to(self.tell(name, **told))


@pytest.mark.parametrize("version", versions())
def test_a_client_of_each_version_leases_waits_and_leaves(host: Host, version: str) -> None:
    with OldClient(host, version) as client, OldClient(host, version) as other:
        other.tell("hello-least", job="other")
        assert other.receive()["resumed"] is False
        client.tell("hello")
        welcome = client.receive()
        assert (welcome["t"], welcome["version"][0]) == ("welcome", 1)
        assert welcome["job"] == {"cluster": "", "uid": os.getuid(), "id": "golden"}
        grant = client.ask_kept("acquire")
        assert set(grant) >= {
            *("lease", "groups", "tokens", "waited_s", "restored", "switch_s"),
            *("contended", "ack_s"),
        }
        assert (grant["groups"], set(grant["tokens"])) == (["g1"], {"g1"})
        client.tell("ack", lease=grant["lease"])
        other.tell("acquire")
        notice = client.receive()
        assert notice == {
            "t": "contended",
            "lease": grant["lease"],
            "groups": ["g1"],
            "waiters": 1,
        }
        assert client.ask_kept("release", lease=grant["lease"]) == {
            "re": client.kept["release"]["id"],
            "waiters": 1,
            "deferred": False,
        }
        later = other.answer_to(other.kept["acquire"]["id"])
        assert later["tokens"]["g1"] > grant["tokens"]["g1"]
        client.tell("acquire", id=20)
        assert client.ask_kept("cancel", acquire=20)["cancelled"] is True
        client.tell("bye")
        other.tell("bye")
        assert client.is_hung_up()
        until(lambda: host.group()["holder"] is None, "both are gone")


@pytest.mark.parametrize("version", versions())
def test_a_client_of_each_version_comes_back_to_its_lease(host: Host, version: str) -> None:
    with OldClient(host, version) as client:
        client.tell("hello")
        welcome = client.receive()
        grant = client.ask_kept("acquire")
    with OldClient(host, version) as client:
        secret = {"session": welcome["session"], "secret": welcome["secret"]}
        client.tell("hello-resume", **secret, uid=None)
        again = client.receive()
        assert again["resumed"] is True
        held = {name: grant[name] for name in ("lease", "groups", "tokens")}
        assert again["leases"] == [held]
        assert client.ask_kept("acquire") == grant
        client.tell("bye")
        assert client.is_hung_up()


HELLOS = [f for f in all_frames() if f.message.get("t") == "hello"]
LATER = [f for f in all_frames() if f.sender == "client" and f not in HELLOS]


@pytest.mark.parametrize("frame", HELLOS, ids=str)
def test_every_kept_hello_is_welcome(host: Host, frame: Golden) -> None:
    with RawClient(host.socket) as client:
        mine = {"uid": os.getuid()} if frame.message.get("uid") is not None else {}
        client.send_bytes(frame_of({**frame.message, **mine}))
        assert client.receive()["t"] == "welcome"
        client.send({"t": "bye"})


@pytest.mark.parametrize("frame", LATER, ids=str)
def test_every_kept_message_is_understood(host: Host, frame: Golden) -> None:
    with RawClient(host.socket) as client:
        assert client.hello(job=None)["t"] == "welcome"
        # Any process may have that pid here, and this one is of job "golden": it would be ended.
        # Jobs of Slurm have numbers, and none is here.
        nobody = {} if frame.message.get("t") == "slurm_job" else {"job": "nobody"}
        mine = {"pid": os.getpid(), **nobody}
        told = {name: mine[name] for name in mine if frame.message.get(name) is not None}
        client.send_bytes(frame_of({**frame.message, **told}))
        if "id" in frame.message:
            answer = client.answer_to(frame.message["id"])
            assert answer.get("err", {}).get("code") not in NOT_UNDERSTOOD, answer
        if frame.name != "bye":
            client.send({"t": "ping", "id": 99})
            assert client.answer_to(99) == {"re": 99}, "the connection goes on"
            client.send({"t": "bye"})
        assert client.is_hung_up()


@pytest.mark.parametrize(
    ("version", "advice"), [([0, 9], "update libtimeslice"), ([2, 0], "update tsliced")]
)
def test_another_major_version_is_told_which_side_to_update(
    host: Host, version: list[int], advice: str
) -> None:
    with RawClient(host.socket) as client:
        answer = client.hello(version=version)
        assert (answer["t"], answer["code"]) == ("error", "unsupported_version")
        assert advice in answer["message"]
        assert client.is_hung_up()


@pytest.mark.parametrize("minor", [1, 99])
def test_a_later_minor_version_is_served_and_its_fields_passed_over(host: Host, minor: int) -> None:
    with RawClient(host.socket) as client:
        assert client.hello(version=[1, minor], caps=["hover"], wings=2)["version"][0] == 1
        assert client.ask("ping", wings=2) == {"re": 1}
        assert client.refusal("fly")[0] == "unknown_request"
        client.send({"t": "bye"})
