# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A finding as text, the same from a module on a host and from the control node."""

from __future__ import annotations

from collections.abc import Mapping


def finding_report(finding: Mapping[str, str], host: str = "") -> str:
    """What was found, what is needed and what to do; ``host`` where Ansible does not say it."""
    head = f"{finding['severity']} {finding['id']}" + (f"  [{host}]" if host else "")
    return f"{head}\n    found:  {finding['found']}\n    needed: {finding['needed']}\n    -> {finding['remedy']}"
