# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Text of a systemd EnvironmentFile= that systemd reads back as meant; what it would drop is refused instead.

Rules: systemd.exec(5), and parse_env_file() and env_value_is_valid() in its source (252 to 257).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_ESCAPED = str.maketrans({character: f"\\{character}" for character in '"\\`$'})
# The kernel's MAX_ARG_STRLEN: a longer NAME=value makes exec fail with E2BIG.
LONGEST_ASSIGNMENT_BYTES = 131071


class EnvironmentRefused(ValueError):
    """A name or value that systemd would drop or change; the message names the variable and never its value."""


def environment_text(variables: Mapping[str, str]) -> str:
    """One line ``NAME="value"`` per variable, sorted by name.

    A value stands in double quotes, where systemd keeps newlines, ``%``, ``#``, ``;`` and blanks as they are and
    takes a backslash before one of ``"\\`$`` away.

    Raises:
        EnvironmentRefused: a name that is none, or a value that systemd ignores with no more than a warning
            (control characters, invalid Unicode, too long).
    """
    lines = []
    for name in sorted(variables):
        check_assignment(name, variables[name])
        lines.append(f'{name}="{variables[name].translate(_ESCAPED)}"\n')
    return "".join(lines)


def check_assignment(name: str, value: str) -> None:
    """Raise EnvironmentRefused unless systemd passes ``name=value`` on unchanged."""
    if not NAME.match(name):
        raise EnvironmentRefused(
            f"{name!r} is no name of an environment variable: use letters, digits and _, no digit first."
        )
    for character in value:
        code = ord(character)
        if (code < 0x20 and character not in "\t\n") or code == 0x7F:
            raise EnvironmentRefused(
                f"The value of {name} holds the control character U+{code:04X}, which systemd drops with the whole"
                " variable: take it out (tab and newline may stay)."
            )
        if 0xD800 <= code <= 0xDFFF or 0xFDD0 <= code <= 0xFDEF or code & 0xFFFE == 0xFFFE:
            raise EnvironmentRefused(
                f"The value of {name} holds U+{code:04X}, which is no Unicode character: take it out."
            )
    if len(name) + 1 + len(value.encode()) > LONGEST_ASSIGNMENT_BYTES:
        raise EnvironmentRefused(
            f"The value of {name} is longer than the {LONGEST_ASSIGNMENT_BYTES} bytes that Linux passes to a process."
        )


def read_environment(text: str) -> dict[str, str]:
    """The variables in text that environment_text() wrote; other lines are left out.

    Only for comparing a file on a host with a plan: it knows the form written here, not every form systemd reads.
    """
    found = {}
    for match in re.finditer(r'^([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"$', text, re.MULTILINE | re.DOTALL):
        found[match.group(1)] = re.sub(r"\\(.)", r"\1", match.group(2), flags=re.DOTALL)
    return found


def hidden(text: str, secrets: Iterable[str]) -> str:
    """``text`` without ``secrets``: a program may print its own environment to the journal, as it is or quoted."""
    forms = {form for value in secrets for form in (value, repr(value)[1:-1], json.dumps(value)[1:-1]) if form}
    for form in sorted(forms, key=len, reverse=True):
        text = text.replace(form, "(hidden)")
    return text
