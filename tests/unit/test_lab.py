# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The parts of the lab that need no host: names, addresses, state, files and the commands it would run."""

from __future__ import annotations

import ipaddress
import json
import shlex
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(CHECKOUT / "tests" / "lab"))

import ask  # noqa: E402
import image  # noqa: E402
import lab  # noqa: E402
import network  # noqa: E402

ALL_CAPABILITIES = (1 << 41) - 1
ORDINARY = lab.Machine(cgroup2=True, capabilities=ALL_CAPABILITIES, systemd=True)
WITHOUT_SYS_RESOURCE = lab.Machine(cgroup2=True, capabilities=ALL_CAPABILITIES & ~(1 << 24), systemd=True)
WITHOUT_CGROUP2 = lab.Machine(cgroup2=False, capabilities=ALL_CAPABILITIES, systemd=False)


# --- addresses


def test_the_demo_has_the_addresses_that_its_inventory_is_written_for():
    subnet = network.Subnet(0)
    assert (str(subnet.ipv4), str(subnet.ipv6)) == ("10.77.0.0/24", "fd77::/64")
    assert subnet.addresses(11) == ("10.77.0.11", "fd77::11")


@given(st.sampled_from(network.SLOTS), st.sampled_from(network.SLOTS))
def test_two_labs_share_no_address(one, other):
    first, second = network.Subnet(one), network.Subnet(other)
    assert first.ipv4.overlaps(second.ipv4) == (one == other)
    assert first.ipv6.overlaps(second.ipv6) == (one == other)


@given(st.sampled_from(network.SLOTS), st.integers(1, 254))
def test_a_number_reads_the_same_in_both_families(slot, number):
    subnet = network.Subnet(slot)
    ipv4, ipv6 = subnet.addresses(number)
    assert ipaddress.ip_address(ipv4) in subnet.ipv4
    assert ipaddress.ip_address(ipv6) in subnet.ipv6
    assert ipv4.rsplit(".", 1)[1] == ipv6.rsplit(":", 1)[1] == str(number)


@pytest.mark.parametrize("number", [0, 255, -1])
def test_a_number_outside_the_subnet_is_refused(number):
    with pytest.raises(ValueError, match=r"10\.77\.0\.0/24"):
        network.Subnet(0).addresses(number)


def test_the_parts_of_the_network_take_no_host_number():
    assert {network.CONTROLLER_NUMBER, network.SINK_NUMBER}.isdisjoint(network.HOST_NUMBERS)


@pytest.mark.parametrize("family", ["127.0.0.1", "::1"])
def test_a_connection_is_found_by_the_address_as_the_kernel_writes_it(family):
    table = Path("/proc/self/net/tcp6" if ":" in family else "/proc/self/net/tcp")
    kind = socket.AF_INET6 if ":" in family else socket.AF_INET
    with socket.create_server((family, 0), family=kind) as server, socket.create_connection(server.getsockname()[:2]):
        port = f"{server.getsockname()[1]:04X}"
        assert f" {network._hex_address(family)}:{port} " in table.read_text()


# --- names


@pytest.mark.parametrize("name", ["demo", "mol_uv_venv", "a", "lab2"])
def test_lab_names(name):
    assert lab.check_name(name, "lab") == name


@pytest.mark.parametrize("name", ["", "Demo", "a-b", "a.b", "2nd", "a/b", "a" * 40, "a b", "*"])
def test_a_wrong_lab_name_is_refused_with_what_one_looks_like(name):
    with pytest.raises(lab.LabError, match="letters, digits and underscores"):
        lab.check_name(name, "lab")


@pytest.mark.parametrize("name", ["glm1", "a", "l40s-2"])
def test_host_names(name):
    assert lab.check_name(name, "host") == name


@pytest.mark.parametrize("name", ["", "GLM", "a_b", "a.b", "-a", "a-", "1a", "a" * 40])
def test_a_wrong_host_name_is_refused(name):
    with pytest.raises(lab.LabError, match="DNS label"):
        lab.check_name(name, "host")


@pytest.mark.parametrize("name", network.RESERVED)
def test_a_host_takes_no_name_of_the_network_itself(name):
    with pytest.raises(lab.LabError, match="give the host another"):
        lab.check_name(name, "host")


# --- state


def test_a_host_keeps_its_number_and_the_first_free_one_is_given(tmp_path):
    state = lab.State(3)
    for host in ["a", "b", "c"]:
        state.add(host)
    assert state.hosts == {"a": 11, "b": 12, "c": 13}
    del state.hosts["b"]
    state.add("a")
    state.add("d")
    assert state.hosts == {"a": 11, "c": 13, "d": 12}
    state.write(tmp_path)
    assert lab.State.read(tmp_path) == state


@pytest.mark.parametrize("content", ["", "{", "[]", '{"slot": 1}', '{"slot": "x", "hosts": {}}'])
def test_what_is_no_state_reads_as_none(tmp_path, content):
    (tmp_path / "state.json").write_text(content)
    assert lab.State.read(tmp_path) is None


def test_no_state_reads_as_none(tmp_path):
    assert lab.State.read(tmp_path) is None


def test_a_full_lab_says_what_to_do():
    state = lab.State(0, {f"h{number}": number for number in network.HOST_NUMBERS})
    with pytest.raises(lab.LabError, match="start another"):
        state.add("one-more")


def test_every_lab_gets_a_subnet_of_its_own_and_the_demo_always_the_same(tmp_path):
    for name, slot in [("demo", 0), ("one", 1), ("two", 2)]:
        assert lab.free_slot(name, tmp_path) == slot
        (tmp_path / name).mkdir()
        lab.State(slot).write(tmp_path / name)
    (tmp_path / "one" / "state.json").unlink()
    assert lab.free_slot("three", tmp_path) == 1


def test_no_subnet_left_says_what_to_do(tmp_path):
    for slot in network.SLOTS:
        (tmp_path / f"l{slot}").mkdir()
        lab.State(slot).write(tmp_path / f"l{slot}")
    with pytest.raises(lab.LabError, match="take down labs"):
        lab.free_slot("late", tmp_path)


# --- files


def test_ssh_reads_its_config_as_meant_also_below_a_path_with_spaces(tmp_path):
    directory = tmp_path / "a b"
    directory.mkdir()
    (directory / "ssh_config").write_text("\n".join(lab.ssh_config("mine", directory, {"glm1": "10.77.9.11"})) + "\n")
    command = ["ssh", "-G", "-F", str(directory / "ssh_config"), "glm1"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    read = dict(line.split(" ", 1) for line in listed.splitlines() if " " in line)
    assert read["hostname"] == "10.77.9.11"
    assert read["user"] == "ops"
    assert read["userknownhostsfile"] == f"{directory}/known_hosts"
    assert read["identityfile"] == f"{directory}/id_ed25519"
    assert read["stricthostkeychecking"] == "true"
    assert read["proxyusefdpass"] == "yes"
    *connect, namespace, host, port = shlex.split(read["proxycommand"])
    assert (namespace, host, port) == ("onprem.mine.controller", "%h", "%p")
    assert Path(connect[-1]).is_file()


def test_the_inventory_of_a_lab_is_yaml_and_its_variables_stand_at_the_hosts(tmp_path):
    directory = tmp_path / "a 'b'"
    lines = lab.inventory(directory, network.Subnet(4), {"a": "10.77.4.11"})
    hosts = yaml.safe_load("\n".join(lines))["all"]["hosts"]
    assert hosts["a"]["ansible_host"] == "10.77.4.11"
    assert hosts["a"]["lab_networks"] == ["10.77.4.0/24", "fd77:0:0:4::/64"]
    assert shlex.split(hosts["a"]["ansible_ssh_common_args"]) == ["-F", f"{directory}/ssh_config"]


def test_labs_of_two_checkouts_share_no_standing_connection(tmp_path):
    addresses = {"a": "10.77.4.11"}
    found = [
        yaml.safe_load("\n".join(lab.inventory(tmp_path / checkout, network.Subnet(4), addresses)))
        for checkout in ("one", "two", "x" * 200)
    ]
    directories = [read["all"]["hosts"]["a"]["ansible_control_path_dir"] for read in found]
    assert len(set(directories)) == 3
    # 107 is the room for a socket's path; Ansible adds /<10 digits>, ssh a dot and 16 letters while it connects.
    assert all(len(str(Path(directory).expanduser())) + 11 + 17 < 107 for directory in directories)


def test_inventory_lab_has_the_addresses_that_the_demo_gets():
    started = (CHECKOUT / "tests/lab/demo.sh").read_text().split("lab.py up ", 1)[1].splitlines()[0].split()
    state = lab.State(lab.free_slot(lab.DEMO, CHECKOUT))
    for host in started:
        state.add(host)
    subnet = network.Subnet(state.slot)
    written = yaml.safe_load((CHECKOUT / "inventory/lab/hosts.yml").read_text())["all"]
    groups = [written["children"]["mirror"], *written["children"]["vllm"]["children"].values()]
    addresses = {host: variables["ansible_host"] for group in groups for host, variables in group["hosts"].items()}
    assert addresses == {host: subnet.addresses(number)[0] for host, number in state.hosts.items()}
    assert written["vars"]["lab_networks"] == [str(subnet.ipv4), str(subnet.ipv6)]
    assert f".cache/lab/{lab.DEMO}/ssh_config" in written["vars"]["ansible_ssh_common_args"]


# --- the image


def test_the_image_follows_its_recipe(tmp_path):
    (tmp_path / "files").mkdir()
    script = tmp_path / "setup.sh"
    script.write_text("one")
    digests = [image.recipe_digest(tmp_path)]
    assert image.recipe_digest(tmp_path) == digests[0]
    script.chmod(0o755)
    digests.append(image.recipe_digest(tmp_path))
    script.write_text("two")
    digests.append(image.recipe_digest(tmp_path))
    script.rename(tmp_path / "files" / "setup.sh")
    digests.append(image.recipe_digest(tmp_path))
    assert len(set(digests)) == len(digests)


def test_the_image_is_built_from_this_machines_sources_of_the_same_release():
    targets = """\
http://mirror/debian/|bookworm|main|
http://mirror/debian/|bookworm|non-free|
http://mirror/debian-security/|bookworm-security|main|yes
http://other/|cloud-bookworm|main|
"""
    assert image.apt_sources(targets) == [
        "deb http://mirror/debian/ bookworm main",
        "deb [trusted=yes] http://mirror/debian-security/ bookworm-security main",
    ]
    assert image.apt_sources(targets, "trixie") == []
    assert image.apt_sources("http://mirror/debian/|bookworm-updates|main|") == []


# --- what a machine allows


def test_an_ordinary_machine_takes_podmans_own_way():
    command = ORDINARY.podman("start", "x", cgroup="c")
    assert command == ["podman", "--runtime", "crun", "--events-backend", "none", "start", "x"]
    options = ORDINARY.container_options()
    assert not [option for option in options if "ulimit" in option or "cgroups=" in option]
    assert "--cap-add=SYS_RESOURCE" in options


def test_without_sys_resource_limits_stay_within_what_may_be_set_and_the_cgroup_is_made_here():
    options = WITHOUT_SYS_RESOURCE.container_options()
    assert "--cgroups=disabled" in options
    assert "--cap-add=SYS_RESOURCE" not in options
    assert [option for option in options if option.startswith("--ulimit=nofile=")]
    command = WITHOUT_SYS_RESOURCE.podman("start", "x", cgroup="c")
    assert command[:2] == ["unshare", "--mount"]
    assert "mount -t cgroup2" not in " ".join(command)


def test_without_cgroup2_one_is_mounted_where_only_podman_sees_it():
    command = WITHOUT_CGROUP2.podman("start", "x", cgroup="c")
    assert command[:4] == ["unshare", "--mount", "--propagation", "private"]
    assert "mount -t cgroup2" in " ".join(command)
    assert WITHOUT_CGROUP2.podman("exec", "x")[0] == "podman"


# --- the demo's question


class Answers(BaseHTTPRequestHandler):
    content = "two words"

    def reply(self, body: object) -> None:
        text = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self) -> None:
        self.reply({"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.reply({"choices": [{"message": {"content": self.content if asked["model"] == "tiny" else None}}]})

    def log_message(self, *_unused: object) -> None:
        pass


@pytest.fixture
def answers():
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_ask_returns_the_text_of_the_completion(answers):
    assert ask.ask(answers, "") == "two words"


@pytest.mark.parametrize("content", ["", "  ", None])
def test_an_empty_completion_is_no_answer(answers, monkeypatch, content):
    monkeypatch.setattr(Answers, "content", content)
    with pytest.raises(ValueError, match="empty"):
        ask.ask(answers, "")


def test_every_instance_of_the_groups_below_vllm_is_asked():
    inventory = {
        "_meta": {
            "hostvars": {
                "a": {"vllm_instances": {"x": {"port": 1}, "y": {"port": 2}}},
                "b": {"vllm_instances": {"z": {"port": 3}}, "vllm_secrets": {"z": {"VLLM_API_KEY": "k"}}},
            }
        },
        "vllm": {"children": ["one", "two"]},
        "one": {"hosts": ["a"]},
        "two": {"hosts": ["b"]},
    }
    expected = [("one", "http://a:1", ""), ("one", "http://a:2", ""), ("two", "http://b:3", "k")]
    assert list(ask.endpoints(inventory)) == expected


def test_no_instance_to_ask_is_a_failure(tmp_path, monkeypatch, capsys):
    (tmp_path / "i.json").write_text(json.dumps({"_meta": {"hostvars": {}}, "vllm": {"children": []}}))
    monkeypatch.setattr(sys, "argv", ["ask.py", str(tmp_path / "i.json")])
    assert ask.main() == 1
    assert "no instance" in capsys.readouterr().err
