# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Does a model fit the memory of its GPUs: weights, KV cache, states, activations, CUDA graphs (docs/memory.md).

Sizes are those of vLLM's own allocation rules; what no rule gives is a measured reserve, named as such. An estimate: a
GPU's last gigabytes are decided by profiling on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .model_knowledge import EXPERTS, Model, is_gdn
from .serve_catalogue import size

GIB = 2**30

# CUDA graphs, where vLLM takes them off the KV cache. One GPU: the most that was logged for Qwen3-Next (48 layers, an
# H200, 0.25.0); other models' runs, which are held out, logged less. Several: 0.95 asked was 0.9124 effective on the
# reference node (8 GPUs of 95 GiB, 256K context), the one figure there is.
GRAPHS_GIB = 0.71
GRAPHS_OF_SEVERAL_GPUS_GIB = (0.95 - 0.9124) * 95
# CUDA's libraries after the start, which profiling takes off too: likewise; 0.22 to 0.24 in the other runs. With NCCL
# and the buffers of all-reduce: Qwen3 30B-A3B on two H200; 0.54 with Qwen3 8B. Data-parallel ranks had 0.14.
LIBRARIES_GIB = 0.25
LIBRARIES_OF_SEVERAL_GPUS_GIB = 0.58
# cuBLAS's workspace on Hopper and later, of PyTorch's allocator (torch/cuda, CUBLAS_WORKSPACE_CONFIG).
CUBLAS_BYTES = 32 * 2**20
# Outside vLLM's budget: CUDA context (0.5 on an H200, 1.5 to 2.0 with NCCL on two), graphs that are not taken off (0.5
# to 1.0 there). Of 96 GB 0.98 leaves 1.9 GiB and ran out, 0.95 leaves 4.8 and did not; 0.93 of an L40S leaves 3.1 and
# does not.
OUTSIDE_GIB = 2.5
# vLLM's defaults where nothing is set: EngineArgs, and get_batch_defaults for its API server: sequences and tokens of a
# batch on GPUs from 70 GiB on (but for the A100, which gets the smaller), and on others.
UTILISATION = 0.92
LARGE_GPU_GIB = 70
LARGE_BATCH, SMALL_BATCH = (1024, 8192), (256, 2048)
# Rows of the buffer in which top-k and top-p are found, one for each multiprocessor of a Hopper GPU, no more than there
# are sequences (apply_top_k_top_p_triton); other GPUs have 108 to 188 of them.
SAMPLER_ROWS = 132
# Tokens of a block of the KV cache (CacheConfig.DEFAULT_BLOCK_SIZE); sparse MLA takes 64, which changes no sum here.
BLOCK = 16
# What the estimate is not sure of, as a share of a GPU's memory: below it the verdict is `tight`.
UNSURE_SHARE = 0.05

_GDN = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
# Beyond this a number is a slip of the hand, and overflows a float.
_LARGEST = 1e15
# What the formulas read of a config.json: numbers from 1, or null. A file may hold anything.
_NUMBERS = (
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "sliding_window"),
    *("kv_lora_rank", "qk_rope_head_dim", "index_topk", "index_head_dim", "vocab_size", "intermediate_size"),
    *("qk_nope_head_dim", "v_head_dim", "top_k_experts", "partial_rotary_factor"),
    *("moe_intermediate_size", "num_experts_per_tok", "max_position_embeddings", "full_attention_interval"),
    *("num_experts", "n_routed_experts", "num_local_experts", "first_k_dense_replace", "decoder_sparse_step"),
    *("num_global_key_value_heads", "global_head_dim", "num_kv_shared_layers", "linear_num_key_heads"),
    *("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"),
)
# GiB of the KV cache on a CPU, for each of vLLM's workers (vllm/envs.py).
CPU_CACHE = "VLLM_CPU_KVCACHE_SPACE"
# Bytes of a weight with its share of scales: of checkpoints and, where vLLM quantises at load, of `quantization`.
_WEIGHT_BYTES = {
    **dict.fromkeys(("fp8", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "experts_int8"), 1.0),
    **dict.fromkeys(("mxfp4", "gpt_oss_mxfp4"), 0.5 + 1 / 32),
    "int8_per_channel_weight_only": 1.0,
    "mxfp8": 1 + 1 / 32,
    **dict.fromkeys(("nvfp4", "modelopt_fp4", "nvfp4_per_token"), 0.5 + 1 / 16),
}
_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}


@dataclass(frozen=True)
class Demand:
    """What one GPU must hold, in bytes.

    Attributes:
        activations: the peak of profiling, and what CUDA's libraries take.
        graphs: CUDA graphs, as far as vLLM takes them off the KV cache.
        token: KV cache of one token of one sequence.
        sequence: what a sequence needs however long it is: states, windows.
        context: KV cache of one sequence of full context, in whole blocks.
    """

    weights: float
    draft: float
    activations: float
    graphs: float
    token: float
    sequence: float
    context: float


@dataclass(frozen=True)
class Serving:
    """The arguments that decide about memory.

    Attributes:
        length: tokens of context.
        redundant: experts that are there twice, for balance among the ranks (EPLB).
        offload_gib: weights per GPU kept in the host's memory.
        states: states that a sequence of a hybrid model has at a time.
        guessed: tokens that are speculated at a time.
    """

    length: int
    utilisation: float = UTILISATION
    sequences: int = SMALL_BATCH[0]
    batched: int = SMALL_BATCH[1]
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: bool = False
    redundant: int = 0
    eager: bool = False
    cache_dtype: str = "auto"
    quantization: str = "None"
    offload_gib: float = 0.0
    states: int = 2
    guessed: int = 0


def serving_of(serve: Mapping[str, Any], model: Model, gpu_gib: float | None = None) -> Serving:
    """The arguments of a plan's ``serve`` with vLLM's defaults on a GPU of that size."""
    sequences, batched = LARGE_BATCH if gpu_gib and gpu_gib >= LARGE_GPU_GIB else SMALL_BATCH

    def number(flag: str, otherwise: int) -> int:
        found = size(serve.get(flag))
        return found if found is not None and 0 < found < _LARGEST else otherwise

    def real(flag: str, otherwise: float) -> float:
        try:
            found = float(serve.get(flag, otherwise))
        except (TypeError, ValueError, OverflowError):
            return otherwise  # no number is a problem of the plan already
        return found if 0 < found < _LARGEST else otherwise

    longest = model.text.get("max_position_embeddings") or 4096
    length = number("max-model-len", longest)
    guessed = _guessed(serve.get("speculative-config"))
    return Serving(
        length=length,
        utilisation=min(real("gpu-memory-utilization", UTILISATION), 1.0),
        sequences=number("max-num-seqs", sequences),
        batched=number("max-num-batched-tokens", batched),
        tensor=number("tensor-parallel-size", 1),
        pipeline=number("pipeline-parallel-size", 1),
        data=number("data-parallel-size", 1),
        expert=serve.get("enable-expert-parallel") is True,
        redundant=_redundant(serve),
        eager=serve.get("enforce-eager") is True,
        cache_dtype=str(serve.get("kv-cache-dtype", "auto")),
        quantization=str(serve.get("quantization")),
        offload_gib=real("cpu-offload-gb", 0.0),
        # MambaSpec.max_memory_usage_bytes: with prefix caching (mode align) two, and one per speculated token. Its
        # default for hybrid models is off in 0.25 and on in 0.28.
        states=(1 if serve.get("enable-prefix-caching") is False else 2) + guessed,
        guessed=guessed,
    )


def _guessed(speculative: Any) -> int:
    """Tokens that are speculated at a time; what is no number is a problem of the plan already."""
    found = speculative.get("num_speculative_tokens") if isinstance(speculative, Mapping) else None
    return found if isinstance(found, int) and 0 < found < _LARGEST else 0


def _redundant(serve: Mapping[str, Any]) -> int:
    balance = serve.get("eplb-config")
    found = balance.get("num_redundant_experts") if isinstance(balance, Mapping) else None
    return found if serve.get("enable-eplb") is True and isinstance(found, int) and 0 < found < _LARGEST else 0


def doubt(model: Model, serve: Mapping[str, Any]) -> str | None:
    """Why an estimate may be too high: what the arguments change in a way that no formula here knows."""
    if str(serve.get("max-model-len")).strip().lower() in ("auto", "-1"):
        return "vLLM itself shortens the context to what fits"
    wanted = str(serve.get("quantization"))
    if not model.quantisation and wanted not in _WEIGHT_BYTES and wanted != "None":
        return f"the size of weights with quantization {wanted} is not known"
    if not str(serve.get("kv-cache-dtype", "auto")).startswith(("auto", "fp8", "int8", *_BYTES)):
        return f"the size of a KV cache of {serve['kv-cache-dtype']} is not known"
    others = ("hf-overrides", "offload-group-size", "decode-context-parallel-size", "prefill-context-parallel-size")
    return next((f"{flag} is not counted" for flag in others if serve.get(flag) not in (None, 0, 1)), None)


def wrong_number(model: Model) -> str | None:
    """The first number of a model's configuration that no formula can use, in words."""
    for key in _NUMBERS:
        value = model.text.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < _LARGEST:
            return f"{key} is {value!r}"
    if is_gdn(model.text) and (lacking := [key for key in _GDN if not model.text.get(key)]):
        return f"{lacking[0]} is missing"
    kinds = model.text.get("layer_types")
    if kinds is not None and not isinstance(kinds, list):
        return f"layer_types is {kinds!r}"
    return None


# -- the host's memory -------------------------------------------------------------------------------------------------


def host_memory_gib(serve: Mapping[str, Any], gpus: int) -> float:
    """GiB of the host's memory that arguments ask for: offloaded weights, on each GPU, and offloaded KV cache, of all.

    Source: UVAOffloadConfig.cpu_offload_gb in vllm/config/offload.py, CacheConfig.kv_offloading_size.
    """
    return _gib(serve.get("cpu-offload-gb")) * gpus + _gib(serve.get("kv-offloading-size"))


def cpu_cache_gib(environment: Mapping[str, Any]) -> float:
    """GiB of KV cache of an instance on the CPU, 4 where none are said (VLLM_CPU_KVCACHE_SPACE in vllm/envs.py)."""
    return _gib(environment.get(CPU_CACHE, 4))


def _gib(value: Any) -> float:
    try:
        found = float(value or 0)
    except (TypeError, ValueError, OverflowError):
        return 0.0  # no number is a problem of the plan already
    return found if 0 < found < _LARGEST else 0.0


# -- what one token and one sequence need ---------------------------------------------------------------------------


def model_bytes(model: Model) -> int:
    """Bytes of one number in the model's own dtype; 2 where none is said."""
    named = str(model.text.get("dtype") or model.text.get("torch_dtype") or model.config.get("torch_dtype") or "")
    return _BYTES.get(named.removeprefix("torch."), 2)


def cache_bytes(model: Model, cache_dtype: str) -> int:
    """Bytes of one number in the KV cache (vllm/utils/torch_utils.py, STR_DTYPE_TO_TORCH_DTYPE)."""
    if cache_dtype.startswith(("fp8", "int8")):
        return 1
    return _BYTES.get(cache_dtype, model_bytes(model))


def layer_kinds(model: Model) -> dict[str, int]:
    """How many layers there are of each attention kind: full, sliding, mla, gdn."""
    text = model.text
    layers = int(text.get("num_hidden_layers") or 0)
    kinds = {"full": layers, "sliding": 0, "mla": 0, "gdn": 0}
    named = text.get("layer_types")
    if is_gdn(text):
        every = text.get("full_attention_interval") or 4
        full = named.count("full_attention") if named else layers // every
        kinds |= {"full": full, "gdn": layers - full}
    elif text.get("kv_lora_rank"):
        kinds |= {"full": 0, "mla": layers}
    elif named and text.get("sliding_window"):
        sliding = named.count("sliding_attention")
        kinds |= {"full": layers - sliding, "sliding": sliding}
    elif text.get("sliding_window") and text.get("use_sliding_window", True) and not named:
        kinds |= {"full": 0, "sliding": layers}
    return kinds


def demand(model: Model, serving: Serving, draft: Model | None = None) -> Demand:
    """What one GPU must hold."""
    groups = list(_groups(model, serving))
    draft_weights = 0.0
    if draft is not None:
        draft_weights = (draft.weight_bytes or 0) / serving.tensor
        if "kv_lora_rank" in draft.text or draft.text.get("num_kv_shared_layers") is None:
            groups += _groups(draft, serving)
    return Demand(
        weights=max(weights_per_gpu(model, serving) - serving.offload_gib * GIB, 0.0),
        draft=draft_weights,
        activations=activations(model, serving) + libraries(serving),
        graphs=graphs(model, serving),
        token=sum(group.layers * group.token for group in groups) / serving.pipeline,
        sequence=sum(group.layers * group.fixed for group in groups) / serving.pipeline,
        context=sum(group.layers * group.context(serving.length) for group in groups) / serving.pipeline,
    )


@dataclass(frozen=True)
class _Group:
    """Layers that keep the same of a sequence, in bytes per layer.

    Attributes:
        layers: with those that vLLM adds so that its groups are of one size.
        block: tokens that are kept together.
        token: per token of the context.
        fixed: however long the context is.
    """

    layers: int
    token: float = 0.0
    fixed: float = 0.0
    block: int = BLOCK

    def context(self, length: int) -> float:
        return math.ceil(length / self.block) * self.block * self.token + self.fixed


def _groups(model: Model, serving: Serving) -> Iterator[_Group]:
    """The layers of a model as vLLM lays out their KV cache.

    Sources: FullAttentionSpec, SlidingWindowSpec, MLAAttentionSpec and MambaSpec in vllm/v1/kv_cache_interface.py,
    _get_kv_cache_groups_uniform_page_size in vllm/v1/core/kv_cache_utils.py, _align_hybrid_block_size in
    vllm/platforms/interface.py, MambaStateShapeCalculator.gated_delta_net_state_shape in
    vllm/model_executor/layers/mamba/mamba_utils.py, ModelConfig.get_num_kv_heads in vllm/config/model.py.
    """
    text, kinds = model.text, layer_kinds(model)
    one = cache_bytes(model, serving.cache_dtype)
    layers = _padded([count for count in kinds.values() if count])
    heads = text.get("num_key_value_heads") or text.get("num_attention_heads") or 1
    width = text.get("head_dim") or (text.get("hidden_size") or 0) // (text.get("num_attention_heads") or 1)
    # Keys and values; a head is not split, so beyond the number of heads they are repeated on every GPU.
    full = (
        2
        * _share(_global(text, "num_global_key_value_heads", heads), serving.tensor)
        * _global(text, "global_head_dim", width)
        * one
    )
    block = BLOCK
    if kinds["gdn"]:
        # A block of attention is made as large as a state, and states are padded to its size.
        state = _gdn_state(model, serving.tensor)
        block = BLOCK * math.ceil(state / (BLOCK * full)) if full else BLOCK
        yield _Group(layers(kinds["gdn"]), fixed=serving.states * max(state, block * full))
    if kinds["full"]:
        yield _Group(layers(kinds["full"]), token=full, block=block)
    if kinds["sliding"]:
        # A window keeps its tokens and those of the batch that is being computed, never more than the context, and one
        # block more, because it may begin inside of one.
        kept = min(int(text["sliding_window"]) - 1 + serving.batched, serving.length)
        token = 2 * _share(heads, serving.tensor) * width * one
        yield _Group(layers(kinds["sliding"]), fixed=(math.ceil(kept / BLOCK) + 1) * BLOCK * token)
    if kinds["mla"]:
        # One latent vector and its rotated part for all heads: the same on every GPU of a tensor-parallel group.
        yield _Group(kinds["mla"], token=_mla_bytes(text, serving.cache_dtype, one))


def _padded(counts: list[int]) -> Callable[[int], int]:
    """How many layers of a kind vLLM makes room for: groups of all kinds have one size, the last is filled up."""
    size = min(counts, default=1)
    if max(counts, default=1) < size * 1.5:
        size = max(counts, default=1)
    return lambda count: math.ceil(count / size) * size


def _global(text: Mapping[str, Any], key: str, otherwise: int) -> int:
    """Full-attention layers of models with windows may have heads of their own number and width."""
    return int(text.get(key) or otherwise)


def _share(heads: int, tensor: int) -> int:
    return max(1, heads // tensor)


def _mla_bytes(text: Mapping[str, Any], cache_dtype: str, one: int) -> float:
    """Bytes of one token in one MLA layer.

    With sparse attention (an indexer) and FP8 vLLM stores 656 bytes: 512 FP8 numbers, four float32 scales, 64 rotated
    numbers in 16 bits (fp8_ds_mla, vllm/v1/attention/backends/mla/flashmla_sparse.py); the indexer keeps a key of its
    own beside it, FP8 with a float32 scale per 128 numbers (vllm/model_executor/models/deepseek_v2.py, Indexer).
    """
    latent, rotated = int(text["kv_lora_rank"]), int(text.get("qk_rope_head_dim") or 0)
    if not text.get("index_topk"):
        return (latent + rotated) * one
    key = int(text.get("index_head_dim") or 128)
    indexer = key + math.ceil(key / 128) * 4
    return (
        latent + latent // 128 * 4 + rotated * 2 if cache_dtype.startswith("fp8") else (latent + rotated) * one
    ) + indexer


def _gdn_state(model: Model, tensor: int) -> float:
    """Bytes of the state of one sequence in one GDN layer: the convolution's last inputs, and a matrix per head."""
    text = model.text
    value_heads = int(text["linear_num_value_heads"])
    key_width, value_width = int(text["linear_key_head_dim"]), int(text["linear_value_head_dim"])
    keys, values = _gdn_widths(text)
    channels = 2 * keys + values
    convolution = channels / tensor * (int(text.get("linear_conv_kernel_dim") or 4) - 1) * model_bytes(model)
    own = _BYTES.get(str(text.get("mamba_ssm_dtype") or ""), model_bytes(model))
    return convolution + value_heads / tensor * value_width * key_width * own


def _gdn_widths(text: Mapping[str, Any]) -> tuple[int, int]:
    """Numbers in all keys, and in all values, of one token."""
    return (
        int(text["linear_num_key_heads"]) * int(text["linear_key_head_dim"]),
        int(text["linear_num_value_heads"]) * int(text["linear_value_head_dim"]),
    )


def weights_per_gpu(model: Model, serving: Serving) -> float:
    """Bytes of weights on one GPU.

    Tensor and pipeline parallelism divide all of it. Experts are spread over the data-parallel ranks as well, with or
    without expert parallelism (FusedMoEParallelConfig.make in vllm/model_executor/layers/fused_moe/config.py); all else
    is there once for each rank. Quantised at load (``--quantization fp8``) the embeddings stay as they are, and so does
    a vision tower of widths that 64 does not divide. Rotary tables are in no checkpoint.
    """
    total = float(model.weight_bytes or 0)
    text = model.text
    if serving.quantization in _WEIGHT_BYTES and not model.quantisation:
        tables = 1 if text.get("tie_word_embeddings", model.config.get("tie_word_embeddings")) else 2
        embeddings = tables * int(text.get("vocab_size") or 0) * int(text.get("hidden_size") or 0) * model_bytes(model)
        kept = embeddings + _tower_that_stays(model)
        of_each = _WEIGHT_BYTES[serving.quantization] / model_bytes(model)
        total = kept + max(total - kept, 0) * of_each
    count, each = experts(model, serving.quantization)
    spread = min(count * each, total)
    copies = (count + serving.redundant) / count if count else 1
    return (total - spread + spread * copies / serving.data) / (serving.tensor * serving.pipeline) + _rotary_tables(
        model
    )


def _tower_that_stays(model: Model) -> float:
    """Bytes of a vision tower that ``--quantization`` leaves alone: Gemma4ForConditionalGeneration.__init__ of 0.25."""
    tower = model.config.get("vision_config")
    if "Gemma4ForConditionalGeneration" not in model.architectures or not isinstance(tower, Mapping):
        return 0.0
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers")
    hidden, inner, layers = (min(size(tower.get(key)) or 0, int(_LARGEST)) for key in keys)
    if hidden % 64 == 0 and inner % 64 == 0:
        return 0.0
    return float(layers * (4 * hidden * hidden + 3 * hidden * inner) * model_bytes(model))


def _rotary_tables(model: Model) -> float:
    """Bytes of the sines and cosines of all positions, one table for each kind of attention, on every GPU.

    Source: RotaryEmbedding._compute_cos_sin_cache in vllm/model_executor/layers/rotary_embedding/base.py.
    """
    text, kinds = model.text, layer_kinds(model)
    width = text.get("head_dim") or (text.get("hidden_size") or 0) // (text.get("num_attention_heads") or 1)
    turned = text.get("qk_rope_head_dim") if kinds["mla"] else _global(text, "global_head_dim", width)
    widths = [int(turned or 0), *([int(width)] if kinds["sliding"] and kinds["full"] else [])]
    share = text.get("partial_rotary_factor") or 1
    return float((text.get("max_position_embeddings") or 0) * sum(widths) * share * model_bytes(model))


def libraries(serving: Serving) -> float:
    """Bytes that CUDA's libraries take after the start."""
    return (LIBRARIES_GIB if serving.tensor == 1 else LIBRARIES_OF_SEVERAL_GPUS_GIB) * GIB


def experts(model: Model, quantization: str = "None") -> tuple[int, float]:
    """How many routed experts a layer has, and the bytes of one of them in all layers: gate, up and down projection."""
    text = model.text
    count = next((int(text[key]) for key in EXPERTS if text.get(key)), 0)
    layers = int(text.get("num_hidden_layers") or 0) - int(text.get("first_k_dense_replace") or 0)
    layers //= int(text.get("decoder_sparse_step") or 1)
    wide = int(text.get("moe_intermediate_size") or text.get("intermediate_size") or 0)
    kind = model.quantisation or quantization
    return count, layers * 3 * int(text.get("hidden_size") or 0) * wide * _WEIGHT_BYTES.get(kind, model_bytes(model))


def activations(model: Model, serving: Serving) -> float:
    """Bytes at the peak of profiling, when one full batch goes through the model and all sequences are sampled.

    The largest counts of what is there one after another: a layer, MLA's stand-in for a long prefill
    (MLAAttention.forward_impl), sampling (TopKTopPSampler.forward_native), and while graphs are compiled the
    benchmark of the kernel that reads the embeddings (inductor's benchmark_combo_kernel, with a table of its own).
    Workspaces of experts stay (TritonExperts.workspace_shapes, of the unquantised kernels); where experts are spread
    over data-parallel ranks, each computes for the tokens of all (AgRsAll2AllManager.dispatch gathers them).
    """
    text, one = model.text, model_bytes(model)
    hidden, words = int(text.get("hidden_size") or 0), int(text.get("vocab_size") or 0)
    batch = serving.batched * one
    workspace, dense = 0, int(text.get("intermediate_size") or 0)
    if "MoE" in model.families:
        dense = 0
        visited = int(text.get("num_experts_per_tok") or text.get("top_k_experts") or 1)
        wide = int(text.get("moe_intermediate_size") or text.get("intermediate_size") or 0)
        wide //= 1 if serving.expert else serving.tensor
        workspace = batch * serving.data * visited * (max(wide, hidden) + max(2 * wide, hidden))
    # Input, residual, attention's and the layer's output; of a feed-forward its two halves and their product, of a GDN
    # layer its projection, that one in order, and what is normed.
    inner = dense
    if is_gdn(text):
        inner = max(inner, 2 * sum(_gdn_widths(text)))
    layer = batch * (4 * hidden + 3 * inner / serving.tensor)
    sampled = serving.sequences * _sampled_bytes(model, serving)
    if _runner_1(model):
        sampled += min(SAMPLER_ROWS, serving.sequences) * 4
    peaks = [layer, sampled * words + batch * hidden]
    if text.get("kv_lora_rank"):
        tokens = min(max(8 * serving.length, 4 * serving.sequences * BLOCK), 64 * 1024)
        heads = _share(int(text.get("num_attention_heads") or 1), serving.tensor)
        widths = int(text.get("qk_nope_head_dim") or 0) + int(text.get("v_head_dim") or 0)
        peaks.append(batch * 4 * hidden + tokens * heads * widths * one)
    if not serving.eager:
        peaks.append(words / serving.tensor * hidden * one + 2 * batch * hidden - workspace)
    return CUBLAS_BYTES + workspace + max(peaks)


def _sampled_bytes(model: Model, serving: Serving) -> int:
    """Bytes per word and sequence: logits in 16 and 32 bits, in runner 1 also their probabilities and random draws.

    With speculation its profiling ends in the rejection sampler (RejectionSampler.forward, sample_recovered_tokens):
    logits in 16 bits of a drafted token and of the one behind it, and again of the latter; in 32 bits the latter's, the
    drafted one's twice, its probabilities, draws, and their reciprocals.
    """
    if not _runner_1(model):
        return 6
    return 2 * 2 + 2 + 6 * 4 if serving.guessed else 14


# Experts or not, vLLM 0.25 runs these with its runner 2 (DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES in vllm/config/vllm.py).
_RUNNER_2 = frozenset({"DeepseekV2ForCausalLM", "Qwen2MoeForCausalLM", "GraniteMoeForCausalLM"})


def _runner_1(model: Model) -> bool:
    """Whether vLLM's first model runner serves it (VllmConfig.use_v2_model_runner)."""
    families = model.families
    return "hybrid" in families or ("MoE" in families and not _RUNNER_2.intersection(model.architectures))


def graphs(model: Model, serving: Serving) -> float:
    """Bytes of CUDA graphs that come off the KV cache: runner 2 leaves them outside of the budget."""
    if serving.eager or not _runner_1(model):
        return 0.0
    # Two GPUs of a tensor-parallel group add without NCCL (CustomAllreduce.__init__; more of them only over NVLink,
    # which no plan knows): their graphs are those of one. 0.43 was logged on two H200, and 1.78 of data-parallel
    # experts, whose tokens NCCL gathers.
    over_nccl = serving.tensor > 2 or ("MoE" in model.families and serving.data > 1)
    return (GRAPHS_OF_SEVERAL_GPUS_GIB if over_nccl else GRAPHS_GIB) * GIB


# -- verdict ----------------------------------------------------------------------------------------------------------


def kv_cache_tokens(available: float, needed: Demand, length: int) -> int:
    """How many tokens ``available`` bytes of KV cache hold, as vLLM logs it: full-context sequences times context."""
    return int(available / needed.context * length) if needed.context else 0


def estimate(
    model: Model,
    serve: Mapping[str, Any],
    gpu_gib: float | None,
    draft: Model | None = None,
    gpus: int | None = None,
) -> dict[str, Any]:
    """Whether it fits, in a plan's form.

    Args:
        serve: the instance's arguments.
        gpu_gib: memory of one GPU in GiB, None where it is not known.
        gpus: how many of them there are to use, None where that is not known.

    Returns:
        ``verdict`` is fits, tight, does not fit or unknown; ``remedy`` the first rung of the ladder that would help.
    """
    if (misread := _misread(model, draft)) is not None:
        return misread
    serving = serving_of(serve, model, gpu_gib)
    needed = demand(model, serving, draft)
    sequence_gib = needed.context / GIB
    fixed = needed.weights + needed.draft + needed.activations + needed.graphs
    # What a GPU must have so that one sequence of full context fits.
    least = (fixed / GIB + sequence_gib) / max(serving.utilisation, 0.01)
    found: dict[str, Any] = {
        "gpus": serving.tensor * serving.pipeline * serving.data,
        "gpu_memory_gib": gpu_gib,
        "weights_gib": round(needed.weights / GIB, 2),
        "draft_gib": round(needed.draft / GIB, 2),
        "activations_gib": round(needed.activations / GIB, 2),
        "graphs_gib": round(needed.graphs / GIB, 2),
        "kv_bytes_per_token": round(needed.token),
        "state_bytes_per_sequence": round(needed.sequence),
        "full_context_gib": round(sequence_gib, 2),
        "least_gpu_memory_gib": round(least, 1),
        "source": model.source,
    }
    if gpu_gib is None:
        return {**found, "verdict": "unknown"}
    verdict, available = _judge(needed, serving, gpu_gib)
    found |= {**_held(available, needed), "verdict": verdict}
    if verdict != "fits":
        found["remedy"] = next(_ladder(model, serving, gpu_gib, draft, verdict, gpus), None)
        if (why := doubt(model, serve)) is not None:
            found["doubt"] = why
    return found


def estimate_on_cpu(
    model: Model, serve: Mapping[str, Any], environment: Mapping[str, Any], draft: Model | None = None
) -> dict[str, Any]:
    """Whether the KV cache of an instance on a CPU, whose size is an argument of its own, holds a sequence.

    Args:
        serve: the instance's arguments.
        environment: its environment; without ``VLLM_CPU_KVCACHE_SPACE`` vLLM takes a share of the host's memory.

    Returns:
        As of ``estimate``, without what only a GPU has.
    """
    if (misread := _misread(model, draft)) is not None:
        return misread
    needed = demand(model, serving_of(serve, model), draft)
    found: dict[str, Any] = {
        "weights_gib": round(needed.weights / GIB, 2),
        "draft_gib": round(needed.draft / GIB, 2),
        "kv_bytes_per_token": round(needed.token),
        "state_bytes_per_sequence": round(needed.sequence),
        "full_context_gib": round(needed.context / GIB, 2),
        "source": model.source,
        "verdict": "unknown",
    }
    if not (cache_gib := _gib(environment.get(CPU_CACHE))):
        return found
    found |= {**_held(cache_gib * GIB, needed), "verdict": "fits"}
    if needed.context > cache_gib * GIB:
        larger = {CPU_CACHE: str(math.ceil(needed.context / GIB))}
        found |= {"verdict": "does not fit", "remedy": {"what": "a larger KV cache", "environment": larger}}
        if (why := doubt(model, serve)) is not None:
            found["doubt"] = why
    return found


def settings_of(remedy: Mapping[str, Any]) -> str:
    """The settings of an estimate's ``remedy``, for a person."""
    settings = {**remedy.get("serve", {}), **remedy.get("environment", {})}
    return ", ".join(f"{name}: {value}" for name, value in settings.items())


def _misread(model: Model, draft: Model | None) -> dict[str, Any] | None:
    """The verdict where a model's configuration has a number that is none."""
    for one in (model, draft):
        if one is not None and (wrong := wrong_number(one)) is not None:
            return {"verdict": "unknown", "source": f"{one.source}: {wrong}"}
    return None


def _held(available: float, needed: Demand) -> dict[str, float]:
    """What is left for the KV cache, and how many sequences of full context that holds."""
    left = max(available, 0.0)
    return {
        "kv_cache_gib": round(left / GIB, 2),
        "full_context_sequences": round(left / needed.context if needed.context else 0.0, 2),
    }


def _judge(needed: Demand, serving: Serving, gpu_gib: float) -> tuple[str, float]:
    """The verdict, and the bytes left for the KV cache."""
    budget = serving.utilisation * gpu_gib * GIB
    available = budget - needed.weights - needed.draft - needed.activations - needed.graphs
    if available < needed.context:
        return "does not fit", available
    outside = (1 - serving.utilisation) * gpu_gib
    sure = available - UNSURE_SHARE * gpu_gib * GIB >= needed.context
    return ("fits" if sure and outside >= OUTSIDE_GIB else "tight"), available


def _ladder(
    model: Model, serving: Serving, gpu_gib: float, draft: Model | None, verdict: str, gpus: int | None
) -> Iterator[dict[str, Any]]:
    """What helps, first what costs least: a rung alone, then rungs on top of each other, then more GPUs."""

    def helps(changed: Serving) -> bool:
        better, _unused = _judge(demand(model, changed, draft), changed, gpu_gib)
        return better == "fits" or (better == "tight" and verdict == "does not fit")

    for rungs in _RUNGS:
        for what, changed, arguments in rungs(serving, gpu_gib):
            if helps(changed):
                yield {"what": what, "serve": arguments}
    stood, said, set_ = serving, list[str](), dict[str, Any]()
    for rungs in _RUNGS:
        last: tuple[Serving, dict[str, Any]] | None = None
        for what, changed, arguments in rungs(stood, gpu_gib):
            if helps(changed):
                yield {"what": ", ".join([*said, what]), "serve": {**set_, **arguments}}
            last = changed, arguments
        if last is not None:
            stood, set_, said = last[0], {**set_, **last[1]}, [*said, what]
    for wider in (replace(serving, tensor=serving.tensor * factor) for factor in (2, 4, 8)):
        enough = gpus is None or wider.tensor * wider.pipeline * wider.data <= gpus
        if enough and (model.heads or wider.tensor) % wider.tensor == 0 and helps(wider):
            yield {"what": "more GPUs", "serve": {"tensor-parallel-size": wider.tensor}}


_Rungs = Iterator[tuple[str, Serving, dict[str, Any]]]


def _lower_utilisation(serving: Serving, gpu_gib: float) -> _Rungs:
    step = serving.utilisation
    while step - 0.01 >= 0.85 and (1 - step) * gpu_gib < OUTSIDE_GIB:
        step = round(step - 0.01, 2)
        yield "lower utilisation", replace(serving, utilisation=step), {"gpu-memory-utilization": step}


def _shorter_context(serving: Serving, _gpu_gib: float) -> _Rungs:
    length = 1 << max(serving.length - 1, 1).bit_length() - 1
    while length >= max(serving.length // 8, 1024):
        yield "shorter context", replace(serving, length=length), {"max-model-len": length}
        length //= 2


def _eager(serving: Serving, _gpu_gib: float) -> _Rungs:
    if not serving.eager:
        yield "eager mode, without CUDA graphs", replace(serving, eager=True), {"enforce-eager": True}


def _fewer_sequences(serving: Serving, _gpu_gib: float) -> _Rungs:
    for count in (64, 16, 4):
        if count < serving.sequences:
            yield "fewer sequences", replace(serving, sequences=count), {"max-num-seqs": count}


def _smaller_batches(serving: Serving, _gpu_gib: float) -> _Rungs:
    for count in (4096, 2048):
        if count < serving.batched:
            yield "fewer batched tokens", replace(serving, batched=count), {"max-num-batched-tokens": count}


def _offloaded(serving: Serving, _gpu_gib: float) -> _Rungs:
    for gib in (8, 16, 32):
        offloaded = replace(serving, offload_gib=serving.offload_gib + gib)
        yield "weights offloaded to the host's memory", offloaded, {"cpu-offload-gb": offloaded.offload_gib}


# What costs least first.
_RUNGS = (_lower_utilisation, _shorter_context, _eager, _fewer_sequences, _smaller_batches, _offloaded)
