# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a host is like: read from the kernel, the package database and nvidia-smi; nothing is changed.

Nothing here fails: what cannot be found out is None, and ``unknown`` says why.
"""

from __future__ import annotations

import ctypes
import os
import platform
import pwd
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .host_probe_command import UNREADABLE, run, text_of
from .host_probe_firewall import firewalls
from .host_probe_gpu import gpus, numa
from .host_probe_instances import compiled, decided, instance
from .host_probe_programs import DECISIVE, programs, python
from .host_probe_proxy import proxy as proxy_of_the_host
from .listeners import port_holders
from .model_files import first_of

Facts = dict[str, Any]

STA_UNSYNC = 0x40  # of adjtimex(2)
_TIMEX_STATUS_OFFSET = 5 * ctypes.sizeof(ctypes.c_long)


def probe(
    paths: Sequence[str] = (),
    packages: Sequence[str] = (),
    ports: Sequence[int] = (),
    pythons: Sequence[str] = (),
    user: str | None = None,
    environments: Mapping[str, Mapping[str, str]] | None = None,
    control_time: float | None = None,
    instances: Sequence[str] = (),
    causes: Sequence[Mapping[str, Any]] = (),
    models: Sequence[Mapping[str, Any]] = (),
    proxy: bool = False,
) -> Facts:
    """All facts of this host. What needs another program runs beside the rest.

    Args:
        paths: file systems to look at; for a path that does not exist yet its nearest existing ancestor counts.
        packages: Debian packages to look for.
        ports: TCP ports whose holders to name, and to look for in others' firewalls.
        pythons: interpreters to look for, such as ``3.12``.
        user: account to look for.
        environments: environment of each instance, to look for compilers and tools as its unit would.
        control_time: the control node's clock when it sent this, seconds since 1970.
        instances: instances whose units, and journals where they do not serve, to look at.
        causes: what a failed start is known by (catalogue/causes.yml).
        models: models whose files to read: ``name``, ``paths`` of which the first with a model counts, ``draft``.
        proxy: whether to look at the host's proxy, too.
    """
    looks: dict[str, Callable[[], Any]] = {
        "gpu": gpus,
        "firewall": lambda: firewalls(ports),
        "packages": lambda: installed_packages(packages),
        "systemd": systemd,
        "pythons": lambda: {version: python(version) for version in pythons},
        "programs": lambda: _programs(environments or {}),
        "instances": lambda: _instances(instances, causes),
        "proxy": lambda: proxy_of_the_host() if proxy else None,
        "models": lambda: {one["name"]: first_of(one["paths"], draft=bool(one.get("draft"))) for one in models},
        "current": lambda: {name: decided(name) for name in environments or {}},
        "os": os_release,
        "machine": platform.machine,
        "kernel": platform.release,
        "glibc": glibc,
        "container": lambda: text_of(Path("/run/systemd/container")),
        "cpus": lambda: len(os.sched_getaffinity(0)),
        "numa": numa,
        "memory": memory,
        "shm": lambda: filesystem("/dev/shm"),  # noqa: S108 - the shared memory itself
        "disks": lambda: {path: filesystem(path) for path in paths},
        "tmp": lambda: filesystem("/tmp"),  # noqa: S108 - where units with PrivateTmp have theirs
        "listeners": lambda: [asdict(holder) for holder in port_holders(ports)],
        "time": lambda: clock(control_time),
        "user": lambda: account(user) if user else None,
        "selinux": selinux,
        "apparmor": apparmor,
    }
    unknown: dict[str, str] = {}

    def look(name: str) -> Any:
        try:
            return looks[name]()
        except UNREADABLE as error:
            unknown[name] = f"{type(error).__name__}: {error}"
            return None

    with ThreadPoolExecutor(8) as pool:
        return {**dict(zip(looks, pool.map(look, looks), strict=True)), "unknown": unknown}


def _programs(environments: Mapping[str, Mapping[str, str]]) -> Facts:
    """The programs by instance; environments that find the same are looked at once."""
    keys = {
        name: tuple((variable, str(values[variable])) for variable in DECISIVE if variable in values)
        for name, values in environments.items()
    }
    found = {key: programs(dict(key)) for key in set(keys.values())}
    return {name: found[key] for name, key in keys.items()}


def _instances(names: Sequence[str], causes: Sequence[Mapping[str, Any]]) -> Facts:
    known = compiled(causes)
    return {name: instance(name, known) for name in names}


# -- system --------------------------------------------------------------------------------------------------------


def os_release(path: Path = Path("/etc/os-release")) -> dict[str, str]:
    """Identifier, version and name of the distribution; empty texts where unknown."""
    fields: dict[str, str] = {}
    for line in (text_of(path) or "").splitlines():
        key, equals, value = line.partition("=")
        if equals:
            fields[key.strip()] = value.strip().strip("\"'")
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
        "files_free": status.f_ffree if status.f_files else None,
        "read_only": bool(status.f_flag & os.ST_RDONLY),
        "noexec": bool(status.f_flag & os.ST_NOEXEC),
    }


def clock(control_time: float | None = None) -> Facts:
    """The host's clock, the control node's when it asked, and whether the kernel's clock is kept in step by someone.

    The kernel knows it for every time service alike: each of them reports to it (adjtimex(2)).
    """
    state = ctypes.create_string_buffer(512)  # a timex with all zero asks and sets nothing
    asked = ctypes.CDLL(None, use_errno=True).adjtimex(state)
    status = ctypes.c_int.from_buffer(state, _TIMEX_STATUS_OFFSET).value
    return {
        "host": time.time(),
        "control": control_time,
        "synchronised": None if asked < 0 else not status & STA_UNSYNC,
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
    text = run("systemctl", "show", "--property", "Version,SystemState")[1]
    shown = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    version = re.match(r"v?(\d+)", shown.get("Version", ""))
    return {"running": True, "version": int(version[1]) if version else None, "state": shown.get("SystemState")}


def selinux(path: Path = Path("/sys/fs/selinux/enforce")) -> str:
    """``absent``, ``permissive`` or ``enforcing``."""
    text = text_of(path)
    return "absent" if text is None else "enforcing" if text == "1" else "permissive"


def apparmor(path: Path = Path("/sys/module/apparmor/parameters/enabled")) -> bool:
    """Whether the kernel enforces AppArmor profiles."""
    return text_of(path) == "Y"


# -- packages ------------------------------------------------------------------------------------------------------


def installed_packages(names: Iterable[str], query: Callable[..., tuple[int, str, str]] = run) -> Facts:
    """For each package whether it is installed, and for a missing one whether apt knows where to get it.

    Returns:
        Name to ``{installed: version or None, candidate: version or None}``. apt is asked only where one is
        missing: it takes up to two seconds to build its cache.
    """
    result: Facts = {name: {"installed": None, "candidate": None} for name in names}
    if not result:
        return result
    text = query("dpkg-query", "-W", "-f", "${Package}\t${Version}\t${db:Status-Abbrev}\n", *result)[1]
    for line in text.splitlines():
        name, version, status = line.split("\t")
        if name in result and status.startswith(("ii", "hi")):
            result[name]["installed"] = version
    missing = [name for name in result if result[name]["installed"] is None]
    if missing:
        text = query("apt-cache", "policy", *missing)[1]
        name = ""
        for line in text.splitlines():
            if not line.startswith(" "):
                name = line.rstrip(":")
            elif (found := re.match(r"\s+Candidate: (\S+)", line)) and name in result and found[1] != "(none)":
                result[name]["candidate"] = found[1]
    return result
