"""Configuration: files to checked values, device shorthand to UUIDs."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

from tsliced.config import (
    Config,
    ConfigError,
    GroupSettings,
    Problem,
    describe,
    known_groups,
    listen_address,
    load,
    peer_addresses,
    resolve_groups,
    shared_groups,
    user_config,
    user_defaults,
    visible_of,
)
from tsliced.config.reader import find_lines
from tsliced.core.model import CoreLimits, DeviceId, GroupConfig, GroupName, HostName
from tsliced.host.devices import Device

SAMPLE = Path(__file__).parents[2] / "systemd/tsliced.toml"
N1, N2, N3 = HostName("n1"), HostName("n2"), HostName("n3")


@pytest.fixture
def main(tmp_path: Path) -> Path:
    return tmp_path / "tsliced.toml"


def load_text(main: Path, text: str) -> Config:
    main.write_text(text)
    return load(main)


def problems_of(main: Path, text: str) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        load_text(main, text)
    return caught.value.problems


def add_dropin(main: Path, name: str, text: str) -> Path:
    directory = main.with_name(main.name + ".d")
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(text)
    return directory / name


def uuid(host: str, index: int) -> DeviceId:
    return DeviceId(f"GPU-0000000{host[-1]}-0000-0000-0000-00000000000{index}")


def devices(host: str, count: int) -> list[Device]:
    return [
        Device(uuid=uuid(host, index), index=index, name="X", total_bytes=1, driver_version="1")
        for index in range(count)
    ]


INVENTORY = devices("n1", 4)
#: What a configuration that names other hosts needs besides.
LINKED = '[daemon]\nhost = "n1"\n[peers]\nauth = "tls"\nhosts = ["n1", "n2", "n3"]\n'


class TestLoading:
    """Files, drop-ins and overrides."""

    def test_without_a_file_there_are_defaults(self, main: Path) -> None:
        config = load(main, optional=True)
        assert config.daemon.socket == "/run/tsliced/tsliced.sock"
        assert config.daemon.host == socket.gethostname()
        assert config.limits.core == CoreLimits()
        assert config.groups == ()
        assert config.files == ()

    def test_a_file_that_was_asked_for_must_exist(self, main: Path) -> None:
        with pytest.raises(ConfigError, match=r"tsliced\.toml: cannot be read: No such file"):
            load(main)

    def test_later_dropins_win_tables_are_merged_and_arrays_replaced(self, main: Path) -> None:
        add_dropin(main, "20-b.toml", '[groups.g]\ndevices = ["1"]\n[daemon]\nloop="asyncio"\n')
        add_dropin(main, "10-a.toml", '[daemon]\nloop = "uvloop"\nlog_level = "debug"\n')
        add_dropin(main, "30-ignored.conf", "this is not read")
        config = load_text(
            main, '[daemon]\nlog_level = "error"\n[groups.g]\ndevices = ["0"]\norder = 3\n'
        )
        assert (config.daemon.loop, config.daemon.log_level) == ("asyncio", "debug")
        assert config.groups == (GroupSettings(name="g", devices=("1",), order=3),)
        assert [Path(file).name for file in config.files] == [
            "tsliced.toml",
            "10-a.toml",
            "20-b.toml",
        ]

    def test_dropins_are_read_in_the_order_of_their_names(self, main: Path) -> None:
        main.write_text("")
        for number in (50, 10, 70, 40, 80, 20, 60, 30):
            add_dropin(main, f"{number}.toml", f"[limits]\nmax_waiters = {number}\n")
        config = load(main)
        assert [Path(file).stem for file in config.files[1:]] == [
            str(number) for number in range(10, 90, 10)
        ]
        assert config.limits.core.max_waiters == 80

    def test_each_value_knows_where_it_was_set(self, main: Path) -> None:
        dropin = add_dropin(main, "a.toml", "# comment\n\n[limits]\nmax_waiters = 7\n")
        main.write_text('[limits]\nmax_waiters = 3\nack_s = 2\n[daemon]\nhost = "n1"\n')
        config = load(main, overrides={"daemon.socket": "/tmp/s"})
        assert str(config.origin("limits", "max_waiters")) == f"{dropin}:4"
        assert str(config.origin("limits", "ack_s")) == f"{main}:3"
        assert str(config.origin("daemon", "socket")) == "command line"
        assert str(config.origin("daemon", "loop")) == "default"

    def test_overrides_win_and_are_checked_like_files(self, main: Path) -> None:
        main.write_text('[daemon]\nsocket = "/a"\n')
        assert load(main, overrides={"daemon.socket": "/b"}).daemon.socket == "/b"
        with pytest.raises(ConfigError, match=r"command line: daemon\.socket: 'b' is not allowed"):
            load(main, overrides={"daemon.socket": "b"})

    def test_limits_of_the_core_and_of_the_server_share_a_section(self, main: Path) -> None:
        config = load_text(main, "[limits]\nmax_waiters = 5\nmax_passed_over = 0\nbacklog = 9\n")
        assert config.limits.core.max_waiters == 5
        assert config.limits.core.max_passed_over == 0
        assert config.limits.server.backlog == 9

    def test_sizes_may_be_written_with_their_unit(self, main: Path) -> None:
        config = load_text(
            main,
            '[memory]\nsnapshot_margin_bytes = "1.5 GiB"\nhost_margin_bytes = 3\n'
            '[history]\nmax_bytes = "2MiB"\n',
        )
        assert config.memory.snapshot_margin_bytes == 3 << 29
        assert config.memory.host_margin_bytes == 3
        assert config.history.max_bytes == 2 << 20

    def test_whole_numbers_are_taken_where_a_number_is_wanted(self, main: Path) -> None:
        value = load_text(main, "[limits]\nack_s = 3\n").limits.core.ack_s
        assert (value, type(value)) == (3.0, float)

    def test_two_configurations_are_equal_if_their_values_are(self, main: Path) -> None:
        first = load_text(main, '[daemon]\nhost = "a"\n')
        assert first == load_text(main, '\n\n[daemon]\nhost = "a"\n[nobody]\nx = 1\n')
        assert first != load_text(main, '[daemon]\nhost = "b"\n')


class TestProblems:
    """What a mistake looks like."""

    def test_all_mistakes_of_all_files_are_listed_with_file_line_and_key(self, main: Path) -> None:
        dropin = add_dropin(main, "a.toml", '[groups.g]\ndevices = [\n  "n1:3-0",\n]\n')
        broken = add_dropin(main, "b.toml", "[daemon]\nx = \n")
        main.write_text(
            '[daemon]\nlog_level = "loud"\n\n\n'
            "[limits]\nack_s = inf\nmax_waiters = 1.5\nmax_clients = -1\n"
        )
        with pytest.raises(ConfigError) as caught:
            load(main)
        lines = str(caught.value).splitlines()
        assert lines[0] == "6 problems in the configuration:"
        assert sorted(lines[1:]) == sorted(
            [
                f"  {broken}:2: this is not TOML: Invalid value (at line 2, column 5)",
                f"  {main}:2: daemon.log_level: 'loud' is not allowed: "
                "use one of debug, info, warning, error",
                f"  {main}:8: limits.max_clients: -1 is not allowed: it must be more than 0",
                f"  {main}:6: limits.ack_s: inf is not allowed: it must be finite",
                f"  {main}:7: limits.max_waiters: 1.5 is not allowed: it must be a whole number",
                f"  {dropin}:2: groups.g.devices: 'n1:3-0' counts backwards: write 0-3",
            ]
        )

    @pytest.mark.parametrize(
        ("text", "key", "says"),
        [
            ("[daemon]\nstrict = 1", "daemon.strict", "must be true or false"),
            ("[daemon]\nsocket = 'run/x'", "daemon.socket", "an absolute path of at most 107"),
            (f"[daemon]\nsocket = '/{'x' * 107}'", "daemon.socket", "at most 107 bytes"),
            ("[daemon]\nhost = 3", "daemon.host", "must be a text in quotes"),
            ("[daemon]\nhost = 'a b'", "daemon.host", "a host name"),
            ("[limits]\nmax_hold_s = 30", "limits.max_hold_s", "no time for a warning"),
            (
                "[limits]\nhold_warning_s = 5\n[groups.g]\ndevices = ['0']\nmax_hold_s = 5",
                "groups.g.max_hold_s",
                "more than limits.hold_warning_s, 5 s",
            ),
            ("[limits]\nmax_clients = true", "limits.max_clients", "a whole number"),
            ("[limits]\nmax_clients_per_uid = 5000", "limits.max_clients_per_uid", "more than"),
            ("[limits]\nmax_sessions_per_uid = 99999", "limits.max_sessions_per_uid", "more than"),
            ("[authority]\ndevice_cgroup = 'on'", "authority.device_cgroup", "auto, off, require"),
            ("daemon = 3", "daemon", "must be a table: [daemon]"),
            ("[daemon]\n[[groups]]", "groups", "must be a table: [groups]"),
            ("[groups]\ng = 1", "groups.g", "must be a table: [groups.g]"),
            ("[groups]\ng = {users = ['a']}", "groups.g.devices", "a group needs devices"),
            ("[groups.g]\ndevices = []", "groups.g.devices", "a group needs devices"),
            ("[groups.g]\ndevices = 'n1:0'", "groups.g.devices", "must be an array"),
            ("[groups.g]\ndevices = [1.5]", "groups.g.devices", "a text or a whole number"),
            ("[groups.g]\ndevices = ['n1:']", "groups.g.devices", "names no devices"),
            ("[groups.g]\ndevices = ['n1:0-x']", "groups.g.devices", "names no devices"),
            ("[groups.g]\ndevices = ['0-99999']", "groups.g.devices", "names no devices"),
            ("[groups.g]\ndevices = ['GPU-12']", "groups.g.devices", "not a whole UUID"),
            ("[groups.g]\ndevices = ['MIG-12']", "groups.g.devices", "partitioned"),
            ("[groups]\n'a b' = {devices = ['0']}", "groups.a b", "a group's name has"),
            ("[groups.g]\ndevices = ['0']\norder = -1", "groups.g.order", "at least 0"),
            ("[limits]\nretry_min_s = 20", "limits.retry_min_s", "more than retry_max_s"),
            ("[limits]\nack_s = 0", "limits.ack_s", "more than 0"),
            ("[limits]\nmax_frame_bytes = '2 MiB'", "limits.max_frame_bytes", "at most 1.04858e"),
            ("[memory]\nhost_margin_bytes = '1 GB'", "memory.host_margin_bytes", '"512 MiB"'),
            ("[scan]\ninterval_s = 3", "scan.interval_s", "at most 2"),
        ],
    )
    def test_a_mistake_says_what_is_allowed(
        self, main: Path, text: str, key: str, says: str
    ) -> None:
        (problem,) = problems_of(main, text)
        assert problem.key == key
        assert says in problem.text
        assert problem.origin.line == text.count("\n") + 1

    def test_what_is_no_file_is_named(self, main: Path) -> None:
        main.mkdir()
        with pytest.raises(ConfigError, match=r"tsliced\.toml: cannot be read: Is a directory"):
            load(main)

    def test_a_file_that_is_not_text_is_named(self, main: Path) -> None:
        main.write_bytes(b"\xff\xfe")
        with pytest.raises(ConfigError, match=r"tsliced\.toml: this is not UTF-8"):
            load(main)

    def test_unknown_keys_are_warnings_with_a_guess(self, main: Path) -> None:
        text = (
            "[limits]\nmax_waitres = 3\n\n[dameon]\nx = 1\n[groups.g]\ndevices=['0']\nuser=['a']\n"
        )
        config = load_text(main, text)
        assert config.warnings == (
            f"{main}:4: dameon: nobody knows this key; did you mean daemon?",
            f"{main}:8: groups.g.user: nobody knows this key; did you mean users?",
            f"{main}:2: limits.max_waitres: nobody knows this key; did you mean max_waiters?",
        )

    def test_unknown_keys_are_mistakes_if_strict(self, main: Path) -> None:
        (problem,) = problems_of(main, "[daemon]\nstrict = true\nzzz = 1\n")
        assert problem.key == "daemon.zzz"
        assert "known are socket, state_dir" in problem.text

    def test_a_device_that_two_groups_name_is_found_without_any_device(self, main: Path) -> None:
        problems = problems_of(
            main,
            f'{LINKED}[groups.a]\ndevices = ["n1:0-2", "n2:0"]\n'
            '[groups.b]\ndevices = ["n1:2-3", "n2:1", "n2:1"]\n',
        )
        assert [problem.text for problem in problems] == [
            "device n1:2 is in group a too: groups are disjoint",
            "device n2:1 is in this group already: groups are disjoint",
        ]

    def test_lines_are_not_taken_from_inside_of_longer_values(self) -> None:
        text = (
            'a = """\nb = 1\n[c]\n"""\n[d]\ne = [ # [\n  "x = [",\n]\n'
            "'f g'.h = 1\n[ i . \"j\" ] # x\nk = '#'\n[[l]]\nm = {n = 1}\n"
        )
        assert find_lines(text) == {
            ("a",): 1,
            ("d",): 5,
            ("d", "e"): 6,
            ("d", "f g", "h"): 9,
            ("i", "j"): 10,
            ("i", "j", "k"): 11,
            ("l",): 12,
            ("l", "m"): 13,
        }


class TestBarrier:
    """A configured barrier allows one whole try (design: T1)."""

    def test_a_barrier_that_is_too_short_is_refused_with_its_sum(self, main: Path) -> None:
        (problem,) = problems_of(
            main,
            f'[limits]\nbarrier_timeout_s = 84\n{LINKED}[groups.g]\ndevices = ["n1:0-3", "n2:0"]\n',
        )
        assert problem.key == "limits.barrier_timeout_s"
        assert problem.origin.line == 2
        assert problem.text == (
            "84 s are too short for group g: one try may take quiesce_timeout_s 30 + 4 ranks on n1 "
            "x freeze_timeout_s 10 + barrier_margin_s 15 = 85 s; allow that, or leave the key out"
        )

    def test_a_barrier_that_just_fits_is_taken(self, main: Path) -> None:
        config = load_text(
            main,
            '[daemon]\nhost = "n1"\n[groups.g]\ndevices = ["n1:0-3"]\n'
            "[limits]\nbarrier_timeout_s = 85\n",
        )
        assert config.limits.core.barrier_timeout_s == 85
        assert len(resolve_groups(config, INVENTORY)) == 1

    def test_what_only_the_devices_tell_is_checked_when_they_are_known(self, main: Path) -> None:
        for groups in ("", '[groups.n1]\ndevices = ["n1:*", "n2:0-2"]\n'):
            config = load_text(main, f"{LINKED}[limits]\nbarrier_timeout_s = 84\n{groups}")
            with pytest.raises(ConfigError, match=r"too short for group n1: .* 4 ranks on n1"):
                resolve_groups(config, INVENTORY)


class TestUser:
    """The daemon of a single user."""

    def test_its_files_lie_where_a_user_s_files_lie(self, tmp_path: Path) -> None:
        given = {
            "XDG_CONFIG_HOME": "/c",
            "XDG_STATE_HOME": "/s",
            "XDG_RUNTIME_DIR": str(tmp_path),
            "CUDA_VISIBLE_DEVICES": "2,3",
        }
        assert user_config(given) == Path("/c/tsliced/tsliced.toml")
        assert user_defaults(given) == {
            "daemon.socket": f"{tmp_path}/tsliced/tsliced.sock",
            "daemon.state_dir": f"/s/tsliced/{socket.gethostname()}",
            "daemon.visible_devices": "2,3",
            "authority.clients": "own",
            "authority.device_cgroup": "off",
        }

    def test_without_these_variables_they_lie_at_home_and_the_socket_in_tmp(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", "/home/me")
        bare = {"XDG_STATE_HOME": "not/absolute", "XDG_RUNTIME_DIR": "/run/user/none-of-mine"}
        assert user_config(bare) == Path("/home/me/.config/tsliced/tsliced.toml")
        found = user_defaults({**bare, "TMPDIR": "/scratch"})
        assert found["daemon.socket"] == f"/scratch/tsliced-{os.getuid()}/tsliced.sock"
        host = socket.gethostname()
        assert found["daemon.state_dir"] == f"/home/me/.local/state/tsliced/{host}"
        assert "daemon.visible_devices" not in found

    def test_files_win_over_it(self, main: Path) -> None:
        main.write_text("[daemon]\nsocket = '/mine'\n")
        defaults = {"daemon.socket": "/default", "daemon.state_dir": "/state"}
        config = load(main, defaults=defaults)
        assert (config.daemon.socket, config.daemon.state_dir) == ("/mine", "/state")
        assert str(config.origin("daemon", "state_dir")) == "--user"

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            (None, [0, 1, 2, 3]),
            ("", []),
            ("NoDevFiles", []),
            ("3, 1", [1, 3]),
            ("1,9,2", [1]),
            ("1,1,2", [1]),
            (uuid("n1", 2), [2]),
            ("GPU-00000001-0000", [0]),
            ("GPU-", []),
            ("MIG-1", []),
        ],
    )
    def test_only_visible_devices_are_served(self, text: str | None, expected: list[int]) -> None:
        assert [device.index for device in visible_of(INVENTORY, text)] == expected


class TestGroups:
    """Device shorthand against what this host has; of other hosts only their names."""

    def resolve(self, main: Path, text: str) -> tuple[GroupConfig, ...]:
        return resolve_groups(load_text(main, LINKED + text), INVENTORY)

    def problems(self, main: Path, text: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            self.resolve(main, text)
        return [problem.text for problem in caught.value.problems]

    def test_without_groups_and_links_this_host_is_one(self, main: Path) -> None:
        config = load_text(main, '[daemon]\nhost = "n1"\n')
        name, uuids = GroupName("n1"), tuple(uuid("n1", n) for n in range(4))
        assert resolve_groups(config, INVENTORY) == (
            GroupConfig(name=name, devices=uuids, order=0),
        )

    def test_without_groups_each_linked_host_is_one(self, main: Path) -> None:
        first, second, third = self.resolve(main, "")
        assert first == GroupConfig(
            name=GroupName("n1"), devices=tuple(uuid("n1", n) for n in range(4)), order=0
        )
        assert second == GroupConfig(name=GroupName("n2"), devices=(), order=1, hosts=(N2,))
        assert third == GroupConfig(name=GroupName("n3"), devices=(), order=2, hosts=(N3,))

    def test_a_group_has_its_own_longest_hold(self, main: Path) -> None:
        first, *_ = self.resolve(main, "[groups.g]\ndevices = ['n1:0']\nmax_hold_s = 60")
        assert first.max_hold_s == 60.0

    def test_a_host_without_devices_is_no_group_and_knows_those_of_others(self, main: Path) -> None:
        assert resolve_groups(load_text(main, ""), []) == ()
        groups = resolve_groups(load_text(main, LINKED), [])
        assert [group.name for group in groups] == ["n2", "n3"]

    @pytest.mark.parametrize(
        ("entries", "expected"),
        [
            ('["n1:0-1", "n1:3"]', [0, 1, 3]),
            ('["n1:0,2-3"]', [0, 2, 3]),
            ('["1-2"]', [1, 2]),
            ("[3, 0]", [3, 0]),
            ('["n1:*"]', [0, 1, 2, 3]),
            (f'["{uuid("n1", 1)}"]', [1]),
            (f'["n1:{uuid("n1", 1).replace("GPU-", "gpu-").upper()}"]', [1]),
        ],
    )
    def test_entries_are_resolved(self, main: Path, entries: str, expected: list[int]) -> None:
        (group,) = self.resolve(main, f"[groups.g]\ndevices = {entries}\n")
        assert group.devices == tuple(uuid("n1", index) for index in expected)
        assert group.hosts == (), "it is here alone"

    @pytest.mark.parametrize(
        ("entries", "devices", "hosts"),
        [
            ('["n1:0-1", "n2:0-1"]', [0, 1], (N1, N2)),
            ('["n2:0-1", "n1:2", "n2:2"]', [2], (N2, N1)),
            ('["n3:*", "n1:1", "n2:0"]', [1], (N3, N1, N2)),
            ('["n2:0-3"]', [], (N2,)),
            (f'["n3:0", "n2:{uuid("n2", 1)}"]', [], (N3, N2)),
        ],
    )
    def test_a_group_of_other_hosts_is_known_with_them_in_the_order_of_its_entries(
        self, main: Path, entries: str, devices: list[int], hosts: tuple[HostName, ...]
    ) -> None:
        (group,) = self.resolve(main, f"[groups.g]\ndevices = {entries}\n")
        assert group.devices == tuple(uuid("n1", index) for index in devices)
        assert group.hosts == hosts

    def test_groups_come_by_order_and_then_by_name_wherever_they_are_written(
        self, main: Path
    ) -> None:
        groups = self.resolve(
            main,
            "[groups.z]\ndevices = [0]\n[groups.b]\ndevices = [1]\norder = 7\n"
            "[groups.a]\ndevices = ['n2:2']\n[groups.c]\ndevices = [3]\norder = 2\n",
        )
        assert [(group.name, group.order) for group in groups] == [
            ("c", 0),
            ("b", 1),
            ("a", 2),
            ("z", 3),
        ]

    def test_unknown_devices_are_named_with_those_known(self, main: Path) -> None:
        two, three = uuid("n2", 0), uuid("n3", 0)
        assert self.problems(
            main,
            f'[groups.g]\ndevices = ["n1:3-5", "n1:{two}"]\n[groups.h]\ndevices = ["{three}"]',
        ) == [
            "'n1:3-5': n1 has no device 4, 5; it has devices 0, 1, 2, 3",
            f"'n1:{two}': there is no such device on n1",
            f"'{three}': there is no such device on n1; one of another host is written HOST:UUID",
        ]

    def test_a_device_named_by_index_and_by_uuid_is_still_one(self, main: Path) -> None:
        assert self.problems(
            main,
            f'[groups.a]\ndevices = ["n1:*"]\n[groups.b]\ndevices = ["{uuid("n1", 1)}"]\n',
        ) == [f"device n1:1 ({uuid('n1', 1)}) is in group a too: groups are disjoint"]

    def test_a_wrong_index_is_a_mistake_also_in_a_group_with_other_hosts(self, main: Path) -> None:
        assert self.problems(main, '[groups.a]\ndevices = ["n1:9", "n3:0"]\n') == [
            "'n1:9': n1 has no device 9; it has devices 0, 1, 2, 3"
        ]

    @pytest.mark.parametrize("entry", ["0", uuid("n1", 0), "*"])
    def test_in_a_group_with_other_hosts_each_entry_names_its_host(
        self, main: Path, entry: str
    ) -> None:
        text = f'{LINKED}[groups.a]\ndevices = ["n2:0", "{entry}"]\n'
        assert [problem.text for problem in problems_of(main, text)] == [
            f"{entry!r} names no host, and the group has devices on n2: write n1:{entry}"
        ]

    def test_devices_of_other_hosts_need_links_to_them(self, main: Path) -> None:
        groups = '[groups.a]\ndevices = ["n4:0", "n5:0", "n2:0"]\n'
        (problem,) = problems_of(main, LINKED + groups)
        assert problem.key == "groups.a.devices"
        assert problem.text == "there is no link to n4, n5: list them in peers.hosts"
        (problem,) = problems_of(main, f'[daemon]\nhost = "n1"\n{groups}')
        assert problem.text == (
            "this is n1, and devices of n4, n5, n2 need links to the daemons there: "
            "set [peers] up (see tslicectl cluster)"
        )


class TestDescribe:
    """The effective configuration."""

    def test_it_shows_each_value_with_its_origin(self, main: Path) -> None:
        config = load_text(main, '[groups."a.b"]\ndevices = ["0"]\n[limits]\nack_s = 2\n')
        lines = describe(config).splitlines()
        assert lines[0] == f"# read: {main}"
        assert f"ack_s = 2.0  # {main}:4" in lines
        assert f'devices = ["0"]  # {main}:2' in lines
        assert 'loop = "auto"  # default' in lines
        assert "# nvml_library is not set" in lines

    def test_it_can_be_read_back(self, main: Path, tmp_path: Path) -> None:
        config = load_text(
            main,
            '[daemon]\nhost = "n1"\nnvml_library = "/a \\"b\\" ü"\n[groups."a.b"]\n'
            'devices = ["n1:0"]\nusers = ["x"]\n[limits]\nretry_min_s = 0.05\n',
        )
        copy = tmp_path / "copy.toml"
        copy.write_text(describe(config), encoding="utf-8")
        assert load(copy) == config
        assert load(copy).warnings == ()


#: Keys without a default that the sample could show.
EXAMPLES = {
    "host",
    "cluster",
    "nvml_library",
    "cuda_library",
    "visible_devices",
    "barrier_timeout_s",
    "auth",
    "hosts",
    "listen",
    "munge_socket",
    "backend",
    "engines",
    "credentials_file",
    "freeze",
    "snapshot",
    "restore",
    "thaw",
    "state",
    "command_timeout_s",
}


class TestPeers:
    """Hosts, addresses, and what must agree."""

    def test_hosts_are_linked_that_are_listed_or_share_a_group_and_no_others(
        self, main: Path
    ) -> None:
        config = load_text(
            main,
            """
            [daemon]
            host = "n1"
            [peers]
            auth = "tls"
            hosts = ["n1=10.0.0.1", "n4=10.0.0.4:99", "n5=[fe80::5]:98", "n6=fe80::6", "n7"]
            port = 7000
            [groups.a]
            devices = ["n1:0", "n2:0-3", "n4:0"]
            [groups.b]
            devices = ["n5:0", "n6:0"]
            """,
        )
        assert {host: str(address) for host, address in peer_addresses(config).items()} == {
            "n2": "n2:7000",
            "n4": "10.0.0.4:99",
            "n5": "[fe80::5]:98",
            "n6": "[fe80::6]:7000",
            "n7": "n7:7000",
        }
        assert str(listen_address(config)) == "10.0.0.1:7000"

    @pytest.mark.parametrize("sign", ["MUNGE_KEY", "MUNGE_SOCKET"])
    def test_listed_hosts_know_each_other_by_munge_where_it_is_set_up(
        self, main: Path, monkeypatch: pytest.MonkeyPatch, sign: str
    ) -> None:
        for name in ("MUNGE_KEY", "MUNGE_SOCKET"):
            monkeypatch.setattr(f"tsliced.config.peers.{name}", str(main.parent / name))
        text = '[daemon]\nhost = "n1"\n[peers]\nhosts = ["n1", "n2"]\n'
        (problem,) = problems_of(main, text)
        assert 'prove who they are: "tls", "psk" or "munge"' in str(problem)
        (main.parent / sign).touch()
        assert load_text(main, text).peers.auth == "munge"
        assert load_text(main, text + 'auth = "none"\ninsecure = true\n').peers.auth == "none"
        assert load_text(main, "").peers.auth is None, "who lists nobody has no links"

    def test_it_listens_where_it_is_told_else_where_others_look_for_it(self, main: Path) -> None:
        text = '[daemon]\nhost = "n1"\n[peers]\nauth = "tls"\n'
        assert listen_address(load_text(main, text)) == ("n1", 7423)
        config = load_text(main, text + 'hosts = ["n1=10.0.0.1"]\nlisten = "0.0.0.0:1"\n')
        assert listen_address(config) == ("0.0.0.0", 1)

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ('listen = "n2"', "peers.auth: say how hosts prove who they are"),
            ('auth = "tls"\nhosts = ["n 2"]', "'n 2' names no host: write NAME, NAME=ADDRESS"),
            ('auth = "tls"\nhosts = ["n2=a:0"]', "'a:0' is no address"),
            ('auth = "tls"\nhosts = ["n2=a:65536"]', "'a:65536' is no address"),
            ('auth = "tls"\nhosts = ["n2=[a]:1"]', "'[a]:1' is no IPv6 address"),
            ('auth = "tls"\nhosts = ["n2", "n2=b"]', "n2 is listed twice"),
            ('auth = "tls"\nlisten = ":1"', "peers.listen: ':1' is no address"),
            ("suspect_s = 0.5", "peers.heartbeat_s: 1 s must be less than suspect_s, 0.5 s"),
            ("lost_s = 2.0", "peers.suspect_s: 3 s must be less than lost_s, 2 s"),
            ("reconnect_min_s = 9.0", "must be less than reconnect_max_s, 5 s"),
            ('auth = "none"\nhosts = ["n2=10.0.0.2"]', 'peers.auth: "none" lets anybody in'),
            ('auth = "none"\nlisten = "::"\nhosts = ["n2=::1"]', "who can reach [::]:7423"),
            ('auth = "ssh"', "use one of tls, psk, munge, none"),
        ],
    )
    def test_a_mistake_is_named_with_its_key(self, main: Path, text: str, problem: str) -> None:
        problems = problems_of(main, f'[daemon]\nhost = "n1"\n[peers]\n{text}\n')
        assert [p for p in problems if problem in str(p)], problems

    def test_none_is_for_loopback_or_whoever_insists(self, main: Path) -> None:
        hosts = 'hosts = ["n1=127.0.0.1:1", "n2=localhost:2"]'
        load_text(main, f'[daemon]\nhost = "n1"\n[peers]\nauth = "none"\n{hosts}\n')
        load_text(main, '[peers]\nauth = "none"\ninsecure = true\nhosts = ["n2=10.0.0.2"]\n')

    def test_groups_that_two_hosts_share_have_the_same_digest_on_both_if_they_are_the_same(
        self, main: Path
    ) -> None:
        def shared(here: str, other: str, devices: str, more: str = "") -> dict[str, str]:
            peers = '[peers]\nauth = "tls"\nhosts = ["n1", "n2", "n3"]\n'
            text = f'{peers}[daemon]\nhost = "{here}"\n[groups.g]\ndevices = {devices}\n{more}'
            return shared_groups(load_text(main, text), HostName(other))

        same = shared("n1", "n2", '["n1:0", "n2:1"]')
        assert same.keys() == {"g"}
        assert shared("n2", "n1", '["n1:0", "n2:1"]') == same
        assert shared("n2", "n1", '["n2:1", "n1:0"]') != same, "the first host arbitrates"
        assert shared("n2", "n1", '["n1:0", "n2:2"]') != same
        assert shared("n2", "n1", '["n1:0", "n2:1"]', 'users = ["bob"]\n') != same
        assert shared("n2", "n1", '["n1:0", "n2:1"]', "order = 1\n") != same
        assert shared("n3", "n1", '["n1:0", "n2:1"]') == {}
        assert shared("n1", "n3", '["n1:0", "n2:1"]') == {}
        assert shared("n2", "n1", '["n1:0", "n2:0", "n2:1"]') == (
            shared("n1", "n2", '["n1:0", "n2:1", "n2:0"]')
        ), "in which order a host's own devices are named does not matter"

    def test_a_group_that_one_host_has_and_the_other_knows_has_the_same_digest_on_both(
        self, main: Path
    ) -> None:
        def known(here: str, other: str, devices: str, more: str = "") -> str | None:
            peers = '[peers]\nauth = "tls"\nhosts = ["n1", "n2", "n3"]\n'
            text = f'{peers}[daemon]\nhost = "{here}"\n[groups.g]\ndevices = {devices}\n{more}'
            return known_groups(load_text(main, text), HostName(other)).get("g")

        far = known("n1", "n2", '["n2:0-3"]')
        assert far is not None
        assert known("n3", "n1", '["n2:0-3"]') == far
        assert known("n2", "n1", '["0-3"]') == known("n2", "n1", '["n2:0-3"]') == f"={far}"
        assert known("n2", "n1", '["n2:0-2"]') != f"={far}"
        assert known("n2", "n1", '["n2:0-3"]', "order = 1\n") != f"={far}"
        assert known("n1", "n2", '["n1:0", "n2:0"]') is None, "it is shared"


class TestSample:
    """systemd/tsliced.toml."""

    def test_as_it_is_it_changes_nothing(self, main: Path) -> None:
        assert load(SAMPLE) == load(main, optional=True)
        assert load(SAMPLE).warnings == ()

    def test_with_every_line_put_in_force_it_shows_every_key_and_its_default(
        self, main: Path
    ) -> None:
        text = re.sub(r"(?m)^#(?=\[|[a-z_]+ = )", "", SAMPLE.read_text())
        shown = load_text(main, text)
        assert shown.warnings == ()
        values = _values(describe(shown))
        defaults = _values(describe(load(main.with_name("none"), optional=True)))
        assert {key: values[key] for key in defaults if key not in EXAMPLES} == {
            key: value for key, value in defaults.items() if key not in EXAMPLES
        }
        set_here = {key.rpartition(".")[2] for key in shown.origins}
        assert set(defaults) | EXAMPLES <= set_here
        assert [group.name for group in shown.groups] == ["trainer", "sampler"]


def _values(described: str) -> dict[str, str]:
    """Return what is set in the text of `describe`; no two sections share a key that matters."""
    pairs = (line.partition("  # ")[0].split(" = ", 1) for line in described.splitlines())
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}
