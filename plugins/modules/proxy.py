# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Edge of the module; the logic is in module_utils/proxy.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: proxy
short_description: Run the proxy, HAProxy around LiteLLM, and change it without a failed request
version_added: 0.2.0
author: onprem.vllm founders (@onprem-vllm)
description:
  - Certificate, HAProxy's configuration and the units are looked at whole before the first file is written.
  - HAProxy is reloaded, which keeps every connection. LiteLLM's processes restart one after the other, each ready by an
    answer of its own before the next; where the first does not start, the files that ran before come back.
  - A process or HAProxy that runs with other content than the files is found out and restarted or reloaded.
  - Ends with an answer of every model through the front door, in the first of the ways that are open to clients.
options:
  release_path:
    description: Directory of LiteLLM's release. It must hold C(manifest.json) and C(bin/litellm).
    type: path
  litellm_config:
    description: Text of LiteLLM's configuration.
    type: str
  litellm_auth:
    description: Text of the Python file that knows the keys.
    type: str
  litellm_unit:
    description: Text of the unit template of LiteLLM's processes; its instance is the port.
    type: str
  haproxy_config:
    description: Text of HAProxy's configuration, C(@digest@) where its digest shall stand.
    type: str
  haproxy_unit:
    description: Text of HAProxy's unit.
    type: str
  haproxy_lua:
    description: Text of HAProxy's Lua file.
    type: str
  program:
    description: Text of the program that the units call.
    type: str
  environment:
    description: Environment of LiteLLM, without secrets.
    type: dict
    default: {}
  secrets:
    description: Secret environment variables of LiteLLM, C(LITELLM_MASTER_KEY) among them; in a root-only file alone.
    type: dict
    default: {}
  keys:
    description: Keys by sha256, as the filter P(onprem.vllm.proxy_keys#filter) makes them.
    type: dict
    default: {}
  models:
    description: Names of the models that must answer in the end.
    type: list
    elements: str
    default: []
  ports:
    description: Ports of LiteLLM's processes on the loopback address.
    type: list
    elements: int
    default: []
  port:
    description: Port that clients use.
    type: int
    default: 443
  listen:
    description: Addresses that HAProxy's configuration listens on; the first is asked in the end.
    type: list
    elements: str
    default: [127.0.0.1]
  paths:
    description: Paths that are open to clients.
    type: list
    elements: str
    default: []
  names:
    description: Names and addresses that clients use; the certificate must be for all of them.
    type: list
    elements: str
    default: []
  certificate:
    description: Certificate with its chain, leaf first, as PEM. Without it a CA on the host issues one.
    type: str
  certificate_key:
    description: Key of O(certificate), PEM.
    type: str
  renew_days:
    description: Days before its end at which a certificate of the own CA is issued anew.
    type: int
    default: 30
  database_unit:
    description: Text of the unit that follows a database of keys.
    type: str
  database_program:
    description: Text of the program that it runs.
    type: str
  database:
    description:
      - PostgreSQL database with keys of teams besides O(keys), V(local) for one on this host's own server, or libpq's
        address of another. Without it nothing follows a database, and the keys that one had are no longer known.
    type: str
    default: ""
  database_password:
    description: Password for another server.
    type: str
    default: ""
  user:
    description: System user of LiteLLM.
    type: str
    default: vllm-proxy
  start_timeout_s:
    description: Seconds a process may take to its first answer.
    type: int
    default: 180
  answer_timeout_s:
    description: Seconds within which every model must have answered.
    type: int
    default: 60
  handed_out:
    description: What O(handed_out_file) holds, the root certificate of the own CA that clients were given, PEM.
    type: str
    default: ""
  handed_out_file:
    description: File on the control node with it, for messages.
    type: str
    default: ""
  state:
    description:
      - V(absent) takes everything back but the release.
      - V(trusted) changes nothing. It fails where clients would not accept O(certificate); or, without one, where the
        own CA would sign with another root than O(handed_out), would have to be made though one was handed out, or ends
        within O(renew_days).
    type: str
    choices: [present, absent, trusted]
    default: present
attributes:
  check_mode:
    description: Predicts what would be done, also on a host where nothing is installed yet.
    support: full
  diff_mode:
    description: Shows every changed file; of environment and certificate only that they change.
    support: full
"""

EXAMPLES = r"""
- name: The proxy is gone
  onprem.vllm.proxy:
    state: absent

- name: Clients trust what the own CA of this host signs
  onprem.vllm.proxy:
    state: trusted
    names: [llm.example.internal]
    handed_out: "{{ lookup('ansible.builtin.file', '/srv/proxy-ca.pem') }}"
    handed_out_file: /srv/proxy-ca.pem
"""

RETURN = r"""
answers:
  description: Seconds that each model took to answer through the front door.
  returned: success
  type: dict
restarted:
  description: Units of LiteLLM that were restarted.
  returned: success
  type: list
  elements: str
haproxy:
  description: V(started), V(reloaded), or empty where it ran as wanted.
  returned: when not in check mode
  type: str
issued:
  description: Why the own CA issued a certificate; empty where it did not.
  returned: success
  type: str
stopped:
  description: Processes that were stopped because fewer are wanted.
  returned: success
  type: list
  elements: str
ca:
  description: The own CA's root certificate, PEM; empty where there is none, or where O(certificate) is given.
  returned: success
  type: str
"""

import pwd
import shutil
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.proxy import DATABASE, Host, KeyStore, Places, Proxy, ProxyFailed, bring_about, remove
from ..module_utils.proxy_certificate import Certificate, CertificateRefused, OwnCa, check

NEEDED = (
    *("release_path", "litellm_config", "litellm_auth", "litellm_unit", "haproxy_config", "haproxy_unit"),
    *("haproxy_lua", "program", "ports", "names"),
)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "release_path": {"type": "path"},
            "litellm_config": {"type": "str"},
            "litellm_auth": {"type": "str"},
            "litellm_unit": {"type": "str"},
            "haproxy_config": {"type": "str"},
            "haproxy_unit": {"type": "str"},
            "haproxy_lua": {"type": "str"},
            "program": {"type": "str"},
            "environment": {"type": "dict", "default": {}},
            "secrets": {"type": "dict", "default": {}, "no_log": True},
            "keys": {"type": "dict", "default": {}, "no_log": False},
            "models": {"type": "list", "elements": "str", "default": []},
            "ports": {"type": "list", "elements": "int", "default": []},
            "port": {"type": "int", "default": 443},
            "listen": {"type": "list", "elements": "str", "default": ["127.0.0.1"]},
            "paths": {"type": "list", "elements": "str", "default": []},
            "names": {"type": "list", "elements": "str", "default": []},
            "certificate": {"type": "str"},
            "certificate_key": {"type": "str", "no_log": True},
            "renew_days": {"type": "int", "default": 30},
            "database_unit": {"type": "str"},
            "database_program": {"type": "str"},
            "database": {"type": "str", "default": ""},
            "database_password": {"type": "str", "default": "", "no_log": True},
            "user": {"type": "str", "default": "vllm-proxy"},
            "start_timeout_s": {"type": "int", "default": 180},
            "answer_timeout_s": {"type": "int", "default": 60},
            "handed_out": {"type": "str", "default": ""},
            "handed_out_file": {"type": "str", "default": ""},
            "state": {"type": "str", "choices": ["present", "absent", "trusted"], "default": "present"},
        },
        required_if=[("state", "present", NEEDED)],
        required_together=[("certificate", "certificate_key")],
        supports_check_mode=True,
    )
    given = module.params
    if given["state"] == "absent":
        try:
            module.exit_json(changed=remove(Places(), check_mode=module.check_mode))
        except ProxyFailed as error:
            module.fail_json(msg=str(error))
    certificate = None
    if given["certificate"]:
        certificate = Certificate(given["certificate"], given["certificate_key"])
    if given["state"] == "trusted":
        try:
            _look(given, certificate)
        except (CertificateRefused, OSError) as error:
            module.fail_json(msg=str(error))
        module.exit_json(changed=False)
    store = None
    if given["database"]:
        local = DATABASE if given["database"] == "local" else ""
        address = "" if local else given["database"]
        store = KeyStore(given["database_unit"], given["database_program"], local, address, given["database_password"])
    proxy = Proxy(
        release=given["release_path"],
        litellm_config=given["litellm_config"],
        litellm_unit=given["litellm_unit"],
        litellm_auth=given["litellm_auth"],
        haproxy_config=given["haproxy_config"],
        haproxy_unit=given["haproxy_unit"],
        haproxy_lua=given["haproxy_lua"],
        program=given["program"],
        environment={name: str(value) for name, value in given["environment"].items()},
        secrets={name: str(value) for name, value in given["secrets"].items()},
        keys=given["keys"],
        models=tuple(given["models"]),
        ports=tuple(given["ports"]),
        port=given["port"],
        listen=tuple(given["listen"]),
        paths=tuple(given["paths"]),
        names=tuple(given["names"]),
        owner=_owner(given["user"]),
        certificate=certificate,
        store=store,
        user=given["user"],
        renew_days=given["renew_days"],
        start_s=given["start_timeout_s"],
        answer_s=given["answer_timeout_s"],
    )
    try:
        module.exit_json(**bring_about(Host(proxy), check_mode=module.check_mode))
    except ProxyFailed as error:
        module.fail_json(msg=str(error))


def _look(given: dict[str, Any], certificate: Certificate | None) -> None:
    """Judge what the proxy would serve with, as far as the host lets it: a bare one has no openssl before the roll-out.

    Raises:
        CertificateRefused: clients would not accept it.
    """
    ca = OwnCa(Places().ca)
    if certificate is None:
        ca.keep(given["handed_out"], given["handed_out_file"])
    if shutil.which("openssl") is None:
        return
    if certificate is None:
        ca.due(given["names"], given["renew_days"])
    else:
        check(certificate, given["names"])


def _owner(user: str) -> tuple[int, int]:
    """Numeric user and group; root's where a first check finds no such user yet."""
    try:
        found = pwd.getpwnam(user)
    except KeyError:
        return 0, 0
    return found.pw_uid, found.pw_gid


if __name__ == "__main__":
    main()
