# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Arguments of ``vllm serve`` that name a file, a model or an adapter on the host.

vLLM looks up what is no path in the Hub, which no host reaches, and a relative path from wherever it was started.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from posixpath import normpath
from typing import Any

from .serve_catalogue import drafts_alone

# What may be the name of a repository to vLLM.
_MODELS = ("tokenizer", "hf-config-path", "generation-config")
_FILES = (
    *("chat-template", "tool-parser-plugin", "reasoning-parser-plugin", "log-config-file", "allowed-local-media-path"),
    *("ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "mm-encoder-fp8-scale-path"),
)
# Words that mean no path.
_WORDS = {"generation-config": ("auto", "vllm")}
# A chat template itself in place of its file (load_chat_template in vllm/entrypoints/chat_utils.py).
_TEMPLATE = frozenset("{}\n")


@dataclass(frozen=True)
class NamedPath:
    """A path that an argument names.

    Attributes:
        at: keys from the argument's name to the value.
        repository: vLLM would take it for the name of a repository, were it no path.
        draft: it is the draft model of speculative decoding.
    """

    at: tuple[str, ...]
    path: str
    repository: bool
    draft: bool = False

    @property
    def absolute(self) -> bool:
        """Whether it is the same wherever vLLM is started."""
        return self.path.startswith("/")

    def below(self, root: str) -> str | None:
        """The first directory below ``root`` on the way to it, None where it lies elsewhere."""
        way = normpath(self.path.replace("//", "/"))
        return way[len(root) + 1 :].split("/", 1)[0] if way.startswith(f"{root}/") else None


def named_paths(serve: Mapping[str, Any]) -> Iterator[NamedPath]:
    """Every path that the arguments name; what is no text is another check's matter."""
    for flag in (*_MODELS, *_FILES):
        value = serve.get(flag)
        if not isinstance(value, str) or not value or value in _WORDS.get(flag, ()):
            continue
        if flag != "chat-template" or not _TEMPLATE & {*value}:
            yield NamedPath((flag,), value, flag in _MODELS)
    if isinstance(speculative := serve.get("speculative-config"), Mapping):
        model = speculative.get("model")
        # Some methods take a class, or nothing, there.
        if isinstance(model, str) and not (drafts_alone(speculative) or speculative.get("method") == "custom_class"):
            yield NamedPath(("speculative-config", "model"), model, True, draft=True)
    modules = serve.get("lora-modules")
    for module in modules if isinstance(modules, list) else [modules]:
        path = module.get("path") if isinstance(module, Mapping) else str(module or "").partition("=")[2]
        if isinstance(path, str) and path and not path.startswith("{"):
            yield NamedPath(("lora-modules",), path, True)
    by_kind = serve.get("default-mm-loras")
    for kind, path in (by_kind if isinstance(by_kind, Mapping) else {}).items():
        if isinstance(path, str):
            yield NamedPath(("default-mm-loras", str(kind)), path, True)
