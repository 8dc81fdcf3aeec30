# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""GPU hosts for tests: an nvidia-smi that replays captures, and refuses what it has no capture of.

``fake_gpus.py KIND DIRECTORY`` writes the program and its captures; KIND ``list`` names the kinds. Two are captures of
real machines. The ``synthetic-`` ones are made here from a real capture, by the documented meaning of its fields: they
prove that facts are read and compared, and nothing about such GPUs.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Callable
from pathlib import Path

REAL = Path(__file__).parents[1] / "unit" / "fixtures" / "nvidia-smi"
Captures = dict[str, str]

PROGRAM = """\
#!/bin/sh
# An nvidia-smi that replays captures; see tests/lab/fake_gpus.py.
captures="$(dirname "$(readlink -f "$0")")/nvidia-smi-captures"
case "$*" in
  "-q -x") name=q.xml ;;
  "topo -m") name=topo.txt ;;
  "-L") name=list.txt ;;
  "--query-gpu=uuid,compute_cap --format=csv,noheader") name=compute_cap.csv ;;
  *) echo "no capture of nvidia-smi $*" >&2; exit 6 ;;
esac
cat "$captures/$name"
exit "$(cat "$captures/status")"
"""
FAILED = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA "
    "driver is installed and running.\n"
)
LEGEND = "\nLegend:\n\n  X    = Self\n  NODE = Connection traversing PCIe within a NUMA node\n"


def real(name: str, state: str = "") -> Captures:
    """The captures of a real machine, as nvidia-smi printed them there."""
    with (REAL / f"{name}-query.csv").open(encoding="utf-8", newline="") as stream:
        rows = [{key.strip(): value.strip() for key, value in row.items()} for row in csv.DictReader(stream)]
    return {
        "q.xml": (REAL / f"{name}{state}.xml").read_text(encoding="utf-8"),
        "topo.txt": (REAL / f"{name}-topo.txt").read_text(encoding="utf-8"),
        "list.txt": "".join(f"GPU {row['index']}: {row['name']} (UUID: {row['uuid']})\n" for row in rows),
        "compute_cap.csv": "".join(f"{row['uuid']}, {row['compute_cap']}\n" for row in rows),
    }


def synthetic(
    count: int,
    name: str,
    architecture: str,
    capability: str,
    memory_mib: int,
    *,
    driver: str = "580.159.04",
    cuda: str = "13.0",
    changes: dict[str, str] | None = None,
    process: tuple[int, str, int] | None = None,
    parts: tuple[tuple[str, int], ...] = (),
) -> Captures:
    """A host with ``count`` equal GPUs, from the real capture of one H200.

    Args:
        changes: further elements of every GPU by tag, with their text.
        process: a program on every GPU: pid, name and memory in MiB.
        parts: MIG devices of every GPU: profile and memory in MiB.
    """
    text = real("h200")["q.xml"]
    head, body = text.split("<gpu id", 1)
    body = "<gpu id" + body[: body.index("</gpu>")] + "</gpu>\n"
    used = process[2] if process else 0
    tags = {
        "product_name": name,
        "product_architecture": architecture,
        "state": "N/A",
        "status": "N/A",
        **(changes or {}),
    }
    for tag, value in tags.items():
        body = re.sub(rf"<{tag}>[^<]*<", f"<{tag}>{value}<", body, count=1)
    for tag, value in (("total", memory_mib), ("used", used), ("free", memory_mib - used - 600)):
        place = body.index("<fb_memory_usage>")
        body = body[:place] + re.sub(rf"<{tag}>\d+ MiB<", f"<{tag}>{value} MiB<", body[place:], count=1)
    if process:
        entry = f"<pid>{process[0]}</pid><type>C</type><process_name>{process[1]}</process_name>"
        entry = f"<process_info>{entry}<used_memory>{process[2]} MiB</used_memory></process_info>"
        body = re.sub(r"<processes>\s*(None)?\s*</processes>", f"<processes>{entry}</processes>", body, count=1)
        assert entry in body, "the capture's list of processes looks different"
    if parts:
        devices = "".join(
            f"<mig_device><index>{number}</index><gpu_instance_id>{number + 1}</gpu_instance_id>"
            "<compute_instance_id>0</compute_instance_id><fb_memory_usage>"
            f"<total>{memory} MiB</total><reserved>0 MiB</reserved><used>16 MiB</used><free>{memory - 16} MiB</free>"
            "</fb_memory_usage></mig_device>"
            for number, (_profile, memory) in enumerate(parts)
        )
        body = re.sub(r"<mig_devices>\s*None\s*</mig_devices>", f"<mig_devices>{devices}</mig_devices>", body, count=1)
        assert devices in body, "the capture's list of MIG devices looks different"
    head = re.sub(r"<driver_version>[^<]*", f"<driver_version>{driver}", head)
    head = re.sub(r"<cuda_version>[^<]*", f"<cuda_version>{cuda}", head)
    head = re.sub(r"<attached_gpus>[^<]*", f"<attached_gpus>{count}", head)
    head = head.replace("<nvidia_smi_log>", "<!-- synthetic: made from a capture of one H200 -->\n<nvidia_smi_log>")
    uuids = [f"GPU-00000000-0000-0000-0000-{index:012d}" for index in range(count)]
    gpus = "".join(
        re.sub(r'id="[^"]*"', f'id="00000000:{index + 1:02X}:00.0"', body, count=1).replace(uuids[0], uuid)
        for index, uuid in enumerate(uuids)
    )
    columns = "".join(f"\tGPU{index}" for index in range(count))
    rows = ""
    for index in range(count):
        node = index * 2 // max(count, 2)
        links = [
            " X " if other == index else "NODE" if other * 2 // max(count, 2) == node else "SYS"
            for other in range(count)
        ]
        rows += "\t".join([f"GPU{index}", *links, f"{node * 32}-{node * 32 + 31}", str(node), "", "N/A"]) + "\n"
    return {
        "q.xml": head + gpus + "</nvidia_smi_log>\n",
        "topo.txt": f"{columns}\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n{rows}{LEGEND}",
        "list.txt": "".join(
            f"GPU {index}: {name} (UUID: {uuid})\n"
            + "".join(
                f"  MIG {profile:<11} Device {number:>2}: (UUID: MIG{uuid[3:-4]}{index:02d}{number:02d})\n"
                for number, (profile, _memory) in enumerate(parts)
            )
            for index, uuid in enumerate(uuids)
        ),
        "compute_cap.csv": "".join(f"{uuid}, {capability}\n" for uuid in uuids),
    }


L40S = (1, "NVIDIA L40S", "Ada Lovelace", "8.9", 46068)
RTX_PRO = (8, "NVIDIA RTX PRO 6000 Blackwell Server Edition", "Blackwell", "12.0", 97887)
KINDS: dict[str, Callable[[], Captures]] = {
    "h200": lambda: real("h200"),
    "2xh200-busy": lambda: real("2xh200", "-busy"),
    "synthetic-8xsm120": lambda: synthetic(*RTX_PRO),
    "synthetic-l40s": lambda: synthetic(*L40S),
    "synthetic-old-driver": lambda: synthetic(*L40S, driver="550.54.15", cuda="12.4"),
    "synthetic-mig": lambda: synthetic(
        1, "NVIDIA H200", "Hopper", "9.0", 143771, changes={"current_mig": "Enabled", "pending_mig": "Enabled"}
    ),
    "synthetic-mig-parts": lambda: synthetic(
        1,
        "NVIDIA H200",
        "Hopper",
        "9.0",
        143771,
        changes={"current_mig": "Enabled", "pending_mig": "Enabled"},
        parts=(("3g.71gb", 71424), ("1g.18gb", 18176)),
    ),
    "synthetic-busy": lambda: synthetic(*L40S, process=(4711, "/usr/bin/python3", 30000)),
    "broken": lambda: dict.fromkeys(("q.xml", "topo.txt", "list.txt", "compute_cap.csv"), FAILED) | {"status": "9"},
}


def write(kind: str, directory: Path) -> None:
    """Put the program and its captures into a directory, where a host's PATH finds the program."""
    captures = directory / "nvidia-smi-captures"
    captures.mkdir(parents=True, exist_ok=True)
    for name, text in {"status": "0", **KINDS[kind]()}.items():
        (captures / name).write_text(text, encoding="utf-8")
    program = directory / "nvidia-smi"
    program.write_text(PROGRAM, encoding="utf-8")
    program.chmod(0o755)


def main(words: list[str]) -> int:
    """The command line; the exit status."""
    if words == ["list"]:
        print("\n".join(KINDS))
        return 0
    if len(words) != 2 or words[0] not in KINDS:
        print(__doc__, f"\nKinds: {', '.join(KINDS)}", file=sys.stderr)
        return 2
    write(words[0], Path(words[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
