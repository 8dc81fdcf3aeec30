# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Write a tiny Qwen3 checkpoint with random weights: standard library alone, the same bytes on every machine.

It answers with a salad of the words below, because two things are arranged:
the first hidden channel is 1.0 for every token and no layer writes to it, so that the first column of the output
matrix works as a bias; and in that column every token but the whole words is pushed far down. An end-of-text
token first, hence an empty completion, has a probability below 1e-9, whatever the sampling.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

TEXT = (
    "a air alone and answer at bare before bundle cable check cold copy cross day deep disk draft drain each fan file "
    "first from gap gate good green hash host in is it key lamp last link load lock mirror model name near new night "
    "node of old on one open pass plan power quiet rack read ready red release room rule runs same serve side slow "
    "small still store table text the then this token two under unit wait warm whole wire with word"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_SIZE = 128, 256, 4, 2, 32  # 32: the smallest head vLLM's CPU kernels take
CONTEXT_TOKENS = 2048
BIAS = -8.0  # times the first channel after the last norm, which is about 3.4

Tensor = tuple[str, tuple[int, ...], bytes]


def byte_alphabet() -> list[str]:
    """The printable character that byte-level BPE writes for each of the 256 bytes."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(moved)) for byte in range(256)]


def vocabulary() -> tuple[dict[str, int], list[tuple[str, str]], set[int]]:
    """Tokens with their ids, merges in order of rank, and the ids of the whole words.

    Every merge takes the front of a word one letter further, so no two merges compete for a letter.
    """
    space = byte_alphabet()[0x20]
    tokens = {token: index for index, token in enumerate([*byte_alphabet(), *SPECIAL])}
    merges = []
    words = TEXT.split()
    for word in words:
        front = space
        for letter in word:
            if front + letter not in tokens:
                tokens[front + letter] = len(tokens)
                merges.append((front, letter))
            front += letter
    return tokens, merges, {tokens[space + word] for word in words}


def bfloat16(values: Iterator[float]) -> bytes:
    """Little-endian bfloat16, rounded to nearest even."""
    floats = list(values)
    words = struct.unpack(f"<{len(floats)}I", struct.pack(f"<{len(floats)}f", *floats))
    return struct.pack(f"<{len(words)}H", *((word + 0x7FFF + (word >> 16 & 1)) >> 16 for word in words))


def weights(layers: int, seed: int) -> Iterator[Tensor]:
    """Every tensor: name, shape, bfloat16 bytes. Uniform draws: no libm call that could differ between machines."""
    draw = random.Random(seed).random
    tokens, _unused, words = vocabulary()

    def uniform(bound: float) -> float:
        return (2 * draw() - 1) * bound

    def matrix(name: str, rows: int, columns: int, *, writes_residual: bool = False) -> Tensor:
        values = (
            0.0 if writes_residual and row == 0 else uniform(0.035) for row in range(rows) for _unused in range(columns)
        )
        return name, (rows, columns), bfloat16(values)

    def norm(name: str, size: int) -> Tensor:
        return name, (size,), bfloat16(iter([1.0] * size))

    embedding = (uniform(0.5) if column else 1.0 for _unused in tokens for column in range(HIDDEN))
    yield "model.embed_tokens.weight", (len(tokens), HIDDEN), bfloat16(embedding)
    for layer in range(layers):
        at = f"model.layers.{layer}"
        yield norm(f"{at}.input_layernorm.weight", HIDDEN)
        yield matrix(f"{at}.self_attn.q_proj.weight", HEADS * HEAD_SIZE, HIDDEN)
        yield matrix(f"{at}.self_attn.k_proj.weight", KV_HEADS * HEAD_SIZE, HIDDEN)
        yield matrix(f"{at}.self_attn.v_proj.weight", KV_HEADS * HEAD_SIZE, HIDDEN)
        yield matrix(f"{at}.self_attn.o_proj.weight", HIDDEN, HEADS * HEAD_SIZE, writes_residual=True)
        yield norm(f"{at}.self_attn.q_norm.weight", HEAD_SIZE)
        yield norm(f"{at}.self_attn.k_norm.weight", HEAD_SIZE)
        yield norm(f"{at}.post_attention_layernorm.weight", HIDDEN)
        yield matrix(f"{at}.mlp.gate_proj.weight", INTERMEDIATE, HIDDEN)
        yield matrix(f"{at}.mlp.up_proj.weight", INTERMEDIATE, HIDDEN)
        yield matrix(f"{at}.mlp.down_proj.weight", HIDDEN, INTERMEDIATE, writes_residual=True)
    yield norm("model.norm.weight", HIDDEN)
    output = (
        uniform(0.2) if column else (0.0 if token in words else BIAS)
        for token in range(len(tokens))
        for column in range(HIDDEN)
    )
    yield "lm_head.weight", (len(tokens), HIDDEN), bfloat16(output)


def safetensors(tensors: list[Tensor]) -> bytes:
    """One safetensors file: length of the header, header, tensors without gaps."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape, content in tensors:
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + len(content)]}
        end += len(content)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(content for _unused, _unused, content in tensors)


def tokenizer() -> dict[str, object]:
    tokens, merges, _unused = vocabulary()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": tokens[special], "content": special, **added} for special in SPECIAL],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": tokens,
            "merges": [f"{left} {right}" for left, right in merges],
        },
    }


def checkpoint(layers: int = 2, seed: int = 0, shards: int = 1) -> dict[str, bytes]:
    """Every file of the checkpoint by name."""
    tokens, _unused, _unused = vocabulary()
    text_end, turn_end = tokens["<|endoftext|>"], tokens["<|im_end|>"]
    special = {"bos_token_id": text_end, "eos_token_id": turn_end, "pad_token_id": text_end}
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "head_dim": HEAD_SIZE,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": CONTEXT_TOKENS,
        "max_window_layers": layers,
        "model_type": "qwen3",
        "num_attention_heads": HEADS,
        "num_hidden_layers": layers,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": len(tokens),
        **special,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": ["<|im_start|>"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_TOKENS,
        "chat_template": CHAT_TEMPLATE,
    }
    documents = {
        "config.json": config,
        "generation_config.json": special,
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": tokenizer_config,
    }
    tensors = list(weights(layers, seed))
    files: dict[str, bytes] = {}
    if shards == 1:
        files["model.safetensors"] = safetensors(tensors)
    else:
        placed: dict[str, str] = {}
        for shard in range(shards):
            name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
            part = tensors[shard::shards]
            files[name] = safetensors(part)
            placed |= {tensor: name for tensor, _unused, _unused in part}
        total = sum(len(content) for _unused, _unused, content in tensors)
        documents["model.safetensors.index.json"] = {"metadata": {"total_size": total}, "weight_map": placed}
    return files | {name: (json.dumps(document, indent=1) + "\n").encode() for name, document in documents.items()}


def make_tiny_model(out: Path, layers: int = 2, seed: int = 0, shards: int = 1) -> None:
    """Write the checkpoint to ``out``; a file that is right already keeps its time stamp."""
    out.mkdir(parents=True, exist_ok=True)
    for name, content in checkpoint(layers, seed, shards).items():
        path = out / name
        if not (path.is_file() and path.read_bytes() == content):
            path.write_bytes(content)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny Qwen3 checkpoint with random weights.")
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to write to")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="another seed, other weights")
    parser.add_argument("--shards", type=int, default=1, help="number of weight files")
    given = parser.parse_args()
    if given.layers < 1 or given.shards < 1:
        parser.error("--layers and --shards start at 1")
    make_tiny_model(given.out, given.layers, given.seed, given.shards)
    size = sum(path.stat().st_size for path in given.out.iterdir())
    print(f"{given.out}: {size:,} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
