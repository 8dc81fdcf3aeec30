# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# pylint: disable=ansible-bad-function  # this logic runs without an AnsibleModule and its run_command
"""What a host is like: read from the kernel, the package database and nvidia-smi; nothing is changed."""

from __future__ import annotations

import os
import platform
import pwd
import re
import shutil
import subprocess
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# A driver that hangs (a GPU that fell off the bus) must not hold the play: it is a finding.
COMMAND_TIMEOUT_S = 20.0
_ENVIRONMENT = {"LC_ALL": "C.UTF-8", "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
_LISTENING = "0A"
_PYTHON_PROBE = (
    "import platform, sysconfig, os;"
    "print(platform.python_version());"
    "print(int(os.path.exists(os.path.join(sysconfig.get_paths()['include'], 'Python.h'))))"
)

Facts = dict[str, Any]


def probe(
    paths: Sequence[str] = (),
    packages: Sequence[str] = (),
    ports: Sequence[int] = (),
    pythons: Sequence[str] = (),
    user: str | None = None,
) -> Facts:
    """All facts of this host. What needs another program runs beside the rest.

    Args:
        paths: file systems to look at; for a path that does not exist yet its nearest existing ancestor counts.
        packages: Debian packages to look for.
        ports: TCP ports whose listeners to name.
        pythons: interpreters to look for, such as ``3.12``.
        user: account to look for.
    """
    with ThreadPoolExecutor(8) as pool:
        slow: dict[str, Any] = {
            "gpu": pool.submit(gpus),
            "packages": pool.submit(installed_packages, packages),
            "systemd": pool.submit(systemd),
            "firewall_tables": pool.submit(firewall_tables),
            **{f"python{version}": pool.submit(python, version) for version in pythons},
        }
        facts: Facts = {
            "os": os_release(),
            "machine": platform.machine(),
            "kernel": platform.release(),
            "glibc": glibc(),
            "cpus": len(os.sched_getaffinity(0)),
            "memory": memory(),
            "shm": filesystem("/dev/shm"),  # noqa: S108 - the shared memory itself
            "disks": {path: filesystem(path) for path in paths},
            "listeners": listeners(ports),
            "time": time.time(),
            "user": account(user) if user else None,
            "selinux": selinux(),
            "apparmor": apparmor(),
        }
        facts["pythons"] = {version: slow[f"python{version}"].result() for version in pythons}
        for name in ("gpu", "packages", "systemd", "firewall_tables"):
            facts[name] = slow[name].result()
    return facts


def run(*command: str) -> tuple[int, str, str]:
    """Status, output and errors of a command; 127 where the program is missing, 124 where it did not end in time."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, env=_ENVIRONMENT, check=False
        )
    except FileNotFoundError:
        return 127, "", f"{command[0]} is not installed"
    except subprocess.TimeoutExpired:
        return 124, "", f"{command[0]} did not answer within {COMMAND_TIMEOUT_S:.0f} s"
    except OSError as error:
        return 126, "", str(error)
    return done.returncode, done.stdout, done.stderr.strip()


# -- system --------------------------------------------------------------------------------------------------------


def os_release(path: Path = Path("/etc/os-release")) -> dict[str, str]:
    """Identifier, version and name of the distribution; empty texts where unknown."""
    fields: dict[str, str] = {}
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            key, equals, value = line.partition("=")
            if equals:
                fields[key.strip()] = value.strip().strip("\"'")
    except OSError:
        pass
    return {
        "id": fields.get("ID", ""),
        "version": fields.get("VERSION_ID", ""),
        "name": fields.get("PRETTY_NAME", ""),
    }


def glibc() -> list[int] | None:
    """Version of the C library, major and minor; None where it is not glibc."""
    try:
        text = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        return None
    found = re.search(r"(\d+)\.(\d+)", text)
    return [int(found[1]), int(found[2])] if found else None


def memory(path: Path = Path("/proc/meminfo")) -> dict[str, int]:
    """Total and available memory in bytes; 0 where the kernel does not say."""
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB$", path.read_text(encoding="ascii"), re.MULTILINE))
    return {"total": int(fields.get("MemTotal", 0)) * 1024, "available": int(fields.get("MemAvailable", 0)) * 1024}


def filesystem(path: str) -> Facts:
    """Size and free space (for root) in bytes of the file system below a path, and whether the path exists."""
    place = Path(path)
    exists = place.exists()
    while not place.exists() and place != place.parent:
        place = place.parent
    status = os.statvfs(place)
    return {
        "exists": exists,
        "device": os.stat(place).st_dev,
        "total": status.f_blocks * status.f_frsize,
        "free": status.f_bfree * status.f_frsize,
        "read_only": bool(status.f_flag & os.ST_RDONLY),
        "noexec": bool(status.f_flag & os.ST_NOEXEC),
    }


def account(name: str) -> Facts | None:
    """Uid, shell and home of a user; None where there is none."""
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return None
    return {"uid": entry.pw_uid, "shell": entry.pw_shell, "home": entry.pw_dir}


def systemd() -> Facts:
    """Whether systemd is PID 1, its version and its state (``running``, ``degraded``, ...)."""
    if not Path("/run/systemd/system").is_dir():
        return {"running": False, "version": None, "state": None}
    state = run("systemctl", "is-system-running")[1]
    text = run("systemctl", "--version")[1]
    version = re.match(r"systemd (\d+)", text)
    return {"running": True, "version": int(version[1]) if version else None, "state": state.strip() or None}


def selinux(path: Path = Path("/sys/fs/selinux/enforce")) -> str:
    """``absent``, ``permissive`` or ``enforcing``."""
    try:
        return "enforcing" if path.read_text(encoding="ascii").strip() == "1" else "permissive"
    except OSError:
        return "absent"


def apparmor(path: Path = Path("/sys/module/apparmor/parameters/enabled")) -> bool:
    """Whether the kernel enforces AppArmor profiles."""
    try:
        return path.read_text(encoding="ascii").strip() == "Y"
    except OSError:
        return False


def firewall_tables() -> list[str] | None:
    """The nftables tables, as ``inet vllm``; None where nft is missing or may not look."""
    status, text, _unused = run("nft", "list", "tables")
    if status != 0:
        return None
    return [line.removeprefix("table ").strip() for line in text.splitlines() if line.startswith("table ")]


def python(version: str) -> Facts | None:
    """Path, exact version and presence of headers of an interpreter on the system's PATH; None where there is none."""
    path = shutil.which(f"python{version}", path=_ENVIRONMENT["PATH"])
    if path is None:
        return None
    status, text, _unused = run(path, "-I", "-c", _PYTHON_PROBE)
    lines = text.split()
    if status != 0 or len(lines) != 2:
        return None
    return {"path": path, "version": lines[0], "headers": lines[1] == "1"}


# -- packages ------------------------------------------------------------------------------------------------------


def installed_packages(names: Sequence[str], query: Callable[..., tuple[int, str, str]] = run) -> Facts:
    """For each package whether it is installed, and for a missing one whether apt knows where to get it.

    Returns:
        Name to ``{installed: version or None, candidate: version or None}``. apt is asked only where one is
        missing: it takes up to two seconds to build its cache.
    """
    result: Facts = {name: {"installed": None, "candidate": None} for name in names}
    if not names:
        return result
    text = query("dpkg-query", "-W", "-f", "${Package}\t${Version}\t${db:Status-Abbrev}\n", *names)[1]
    for line in text.splitlines():
        name, version, status = line.split("\t")
        if name in result and status.startswith(("ii", "hi")):
            result[name]["installed"] = version
    missing = [name for name in names if result[name]["installed"] is None]
    if missing:
        text = query("apt-cache", "policy", *missing)[1]
        name = ""
        for line in text.splitlines():
            if not line.startswith(" "):
                name = line.rstrip(":")
            elif (found := re.match(r"\s+Candidate: (\S+)", line)) and name in result and found[1] != "(none)":
                result[name]["candidate"] = found[1]
    return result


# -- listeners -----------------------------------------------------------------------------------------------------


def listeners(ports: Iterable[int], proc: Path = Path("/proc")) -> list[Facts]:
    """Who listens on the ports, over IPv4 and IPv6.

    Returns:
        Each with port, pid, program and systemd unit; the last three None where the holder cannot be seen (another
        namespace, no root).
    """
    wanted = set(ports)
    inodes: dict[str, int] = {}
    for table in ("net/tcp", "net/tcp6"):
        try:
            lines = (proc / table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            port = int(fields[1].rpartition(":")[2], 16)
            if fields[3] == _LISTENING and port in wanted:
                inodes[fields[9]] = port
    if not inodes:
        return []
    holders = _socket_holders(set(inodes), proc)
    found: dict[tuple[int, int | None], Facts] = {}
    for inode, port in inodes.items():
        pid = holders.get(inode)
        found[port, pid] = {
            "port": port,
            "pid": pid,
            "program": None if pid is None else _read(proc / str(pid) / "comm"),
            "unit": None if pid is None else unit_of(_read(proc / str(pid) / "cgroup") or ""),
        }
    return sorted(found.values(), key=lambda entry: (entry["port"], entry["pid"] or 0))


def unit_of(cgroup: str) -> str | None:
    """The service a process belongs to, from its ``/proc/<pid>/cgroup``."""
    services = re.findall(r"([^/\n]+\.service)(?=/|$)", cgroup, re.MULTILINE)
    return services[-1] if services else None


def _socket_holders(inodes: set[str], proc: Path) -> dict[str, int]:
    holders: dict[str, int] = {}
    for entry in sorted((int(name) for name in os.listdir(proc) if name.isdigit()), reverse=True):
        try:
            descriptors = os.listdir(proc / str(entry) / "fd")
        except OSError:
            continue  # ended meanwhile, or not ours to see
        for descriptor in descriptors:
            try:
                target = os.readlink(proc / str(entry) / "fd" / descriptor)
            except OSError:
                continue
            if target.startswith("socket:[") and target[8:-1] in inodes:
                holders[target[8:-1]] = entry  # the lowest pid comes last: the parent of forked workers
    return holders


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


# -- GPUs ----------------------------------------------------------------------------------------------------------


def gpus() -> Facts:
    """Driver and GPUs, from nvidia-smi.

    Returns:
        ``{driver, cuda, devices, error}``: error says why nothing could be read although there is a GPU or driver.
    """
    status, text, message = run("nvidia-smi", "-q", "-x")
    if status == 127:
        present = any(_read(path) == "0x10de" for path in Path("/sys/bus/pci/devices").glob("*/vendor"))
        error = "there is an NVIDIA device, but no nvidia-smi: the driver is not installed" if present else None
        return {"driver": None, "cuda": None, "devices": [], "error": error}
    if status != 0:
        reason = (text.strip() or message or f"status {status}").splitlines()[-1]
        return {"driver": None, "cuda": None, "devices": [], "error": f"nvidia-smi: {reason}"}
    try:
        found = parse_nvidia_smi(text)
    except ET.ParseError as error:
        return {"driver": None, "cuda": None, "devices": [], "error": f"nvidia-smi printed no XML: {error}"}
    status, text, _unused = run("nvidia-smi", "--query-gpu=uuid,compute_cap", "--format=csv,noheader")
    capability = dict(line.split(", ", 1) for line in text.splitlines() if ", " in line) if status == 0 else {}
    for device in found["devices"]:
        device["compute_capability"] = capability.get(device["uuid"])
    return found


def parse_nvidia_smi(text: str) -> Facts:
    """The parts of ``nvidia-smi -q -x`` that a plan is compared with. Memory is in MiB.

    Raises:
        xml.etree.ElementTree.ParseError: the text is no XML.
    """
    root = ET.fromstring(text)  # noqa: S314 - printed by the driver's own program
    return {
        "driver": _known(root.findtext("driver_version")),
        "cuda": _known(root.findtext("cuda_version")),
        "devices": [_device(index, element) for index, element in enumerate(root.iter("gpu"))],
        "error": None,
    }


def _device(index: int, element: ET.Element) -> Facts:
    return {
        "index": index,
        "name": _known(element.findtext("product_name")),
        "uuid": _known(element.findtext("uuid")),
        "architecture": _known(element.findtext("product_architecture")),
        "bus": element.get("id"),
        "memory_mib": _mib(element.findtext("fb_memory_usage/total")),
        "memory_used_mib": _mib(element.findtext("fb_memory_usage/used")),
        "mig": (element.findtext("mig_mode/current_mig") or "").strip() == "Enabled",
        "persistence": (element.findtext("persistence_mode") or "").strip() == "Enabled",
        "compute_capability": None,
        "processes": [
            {
                "pid": int(process.findtext("pid") or 0),
                "name": _known(process.findtext("process_name")),
                "memory_mib": _mib(process.findtext("used_memory")),
            }
            for process in element.iterfind("processes/process_info")
        ],
    }


def _known(text: str | None) -> str | None:
    text = (text or "").strip()
    return None if text in ("", "N/A", "[N/A]", "None") else text


def _mib(text: str | None) -> int | None:
    found = re.match(r"(\d+) MiB", (text or "").strip())
    return int(found[1]) if found else None
