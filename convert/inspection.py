"""What a folder holds and what will become of it, from headers alone."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from convert.checkpoint_folder import is_checkpoint
from convert.checkpoint_source import CheckpointSource, open_checkpoint
from convert.files import dtypes
from convert.files.hf_folder import HFFolder, open_hf_folder
from convert.import_plan import ImportPlan, plan_import
from convert.names import HFTensor, checkpoint_leaf
from convert.progress import count_dtypes, human_bytes, info_dtypes, print_dtypes
from jaxseek.config import ModelConfig, ModelType

_FAMILIES: dict[ModelType, str] = {
    "llama": "Llama architecture, as DeepSeek LLM, Coder and R1-Distill-Llama have it",
    "qwen2": "Qwen2 architecture, as R1-Distill-Qwen has it",
    "qwen3": "Qwen3 architecture, as R1-0528-Qwen3 has it",
    "deepseek": "DeepSeekMoE 16B architecture",
    "deepseek_v2": "DeepSeek-V2 architecture",
    "deepseek_v3": "DeepSeek-V3 architecture, R1's too",
}
# A parameter, AdamW's two moments and its gradient, each in float32.
_MASTER_BYTES, _MOMENT_BYTES, _GRADIENT_BYTES = 4, 2 * 4, 4
_TOKENIZER = "tokenizer.json"
_OTHER_FILES = ("tokenizer_config.json", "generation_config.json")
_TEMPLATE = "chat_template"


def inspect(path: Path) -> None:
    """Print what a Hugging Face folder is, what its files hold, and what a conversion makes of it.

    No weight is read. A run folder or a converted model of jaxseek is described too.

    Raises:
        UserError: it is neither, or it could not be converted; with all that is wrong.
    """
    path = path.expanduser()
    if is_checkpoint(path):
        _print_checkpoint(open_checkpoint(path))
        return
    with open_hf_folder(path) as folder:
        _print_folder(folder, plan_import(folder, read_values=False))


def _print_folder(folder: HFFolder, plan: ImportPlan) -> None:
    size = sum(file.stat().st_size for file in folder.files)
    kinds = sorted({file.suffix.removeprefix(".") for file in folder.files})
    print(f"{folder.path}: a model in Hugging Face's format")
    _print_facts(
        {
            **_model_facts(plan.config, plan.tensors.values()),
            "weights": f"{_counted(len(folder.files), 'file')} ({', '.join(kinds)}), "
            f"{human_bytes(size)}",
            "other files": _other_files([file.name for file in folder.carried_files()], folder),
        }
    )
    print_dtypes(info_dtypes(folder.tensors.values()))
    parameters = sum(math.prod(tensor.shape) for tensor in plan.tensors.values())
    converted = sum(map(plan.stored_bytes, (*plan.tensors, *plan.kept)))
    print("What becomes of it:")
    _print_facts(
        {
            "to-jax": f"{human_bytes(converted)} ({_dtype_names(plan)}); without optimizer state",
            "training": _training_state(parameters),
            "float8": _float8(plan),
            "left out": ", ".join(_shortened(plan.dropped)) or None,
        }
    )
    for note in plan.notes:
        print(note)


def _print_checkpoint(source: CheckpointSource) -> None:
    files = source.manifest.files.values()
    print(f"{source.folder}: a checkpoint of jaxseek, step {source.manifest.step}")
    parameters = {checkpoint_leaf(path) for t in source.tensors.values() for path in t.paths}
    others = len(source.manifest.leaves.keys() - parameters)
    mtp = source.mtp
    _print_facts(
        {
            **_model_facts(source.config, source.tensors.values()),
            "came from": "a Hugging Face folder" if source.source else "no other model",
            "files": f"{_counted(len(files), 'file')}, {human_bytes(sum(f.size for f in files))}",
            "optimizer": f"{_counted(others, 'array')} beside the parameters"
            if others
            else "no state",
            "MTP": f"{len(mtp)} tensors kept" if mtp else None,
            "other files": _other_files([file.name for file in source.carried_files]),
        }
    )
    print("What to-hf makes of it:")
    sizes = {name: math.prod(tensor.shape) for name, tensor in source.tensors.items()}
    exported = [
        (dtype, sizes[name], sizes[name] * dtypes.NUMPY[dtype].itemsize)
        for name, dtype in source.dtypes.items()
    ]
    print_dtypes(count_dtypes([*exported, *((i.dtype, i.size, i.nbytes) for i in mtp.values())]))


def _print_facts(facts: Mapping[str, str | None]) -> None:
    for label, fact in facts.items():
        if fact is not None:
            print(f"  {label:<12} {fact}")


def _model_facts(config: ModelConfig, tensors: Iterable[HFTensor]) -> dict[str, str | None]:
    return {
        "model_type": f"{config.model_type} ({_FAMILIES[config.model_type]})",
        "layers": _layers(config),
        "sizes": f"hidden {config.hidden_size:,}, feed-forward {config.intermediate_size:,}, "
        f"vocabulary {config.vocab_size:,}, "
        f"{'tied' if config.tie_word_embeddings else 'untied'} embeddings",
        "positions": _positions(config),
        "attention": _attention(config),
        "experts": _experts(config),
        "parameters": _parameters(config, tensors),
    }


def _layers(config: ModelConfig) -> str:
    kinds = [f"{config.num_dense_layers} dense", f"{config.num_moe_layers} with experts"]
    text = f"{config.num_hidden_layers}"
    if config.is_moe:
        text += f": {', '.join(kinds)}"
    if config.num_nextn_predict_layers:
        text += f"; {config.num_nextn_predict_layers} more for multi-token prediction (MTP)"
    return text


def _positions(config: ModelConfig) -> str:
    rope = config.rope_scaling
    scaling = f", {rope.rope_type} scaling by {rope.factor:g}" if rope else ""
    return f"{config.max_position_embeddings:,}, rope_theta {config.rope_theta:g}{scaling}"


def _attention(config: ModelConfig) -> str:
    heads = f"{config.num_attention_heads} heads"
    if config.is_mla:
        query = f"{config.q_lora_rank}" if config.q_lora_rank else "none"
        return (
            f"latent (MLA), {heads} of {config.attention_head_dim} "
            f"({config.qk_nope_head_dim} + {config.qk_rope_head_dim} rotated), values of "
            f"{config.v_head_dim}, rank {config.kv_lora_rank} of keys and values, {query} of "
            "queries"
        )
    return (
        f"{heads} of {config.attention_head_dim}, {config.num_key_value_heads} of keys and values"
    )


def _experts(config: ModelConfig) -> str | None:
    if not config.is_moe:
        return None
    groups = (
        f" from {config.topk_group} of {config.n_group} groups"
        if config.topk_method != "greedy" and config.n_group > 1
        else ""
    )
    return (
        f"{config.n_routed_experts} of width {config.moe_intermediate_size}, "
        f"{config.num_experts_per_tok} per token{groups}; {config.n_shared_experts} shared"
    )


def _parameters(config: ModelConfig, tensors: Iterable[HFTensor]) -> str:
    """Their number, MTP layers' left out, and of a mixture of experts how many a token meets."""
    routed = others = 0
    for tensor in tensors:
        size = math.prod(tensor.shape)
        if tensor.form == "expert":
            routed += size
        else:
            others += size
    text = f"{routed + others:,}"
    if config.n_routed_experts and config.num_experts_per_tok:
        active = others + routed * config.num_experts_per_tok // config.n_routed_experts
        text += f", {active:,} of them for each token"
    return text


def _other_files(names: list[str], folder: HFFolder | None = None) -> str:
    """The tokenizer, templates and the like that are there, and which of them are not."""
    found = ", ".join(names) or "none"
    missing = [name for name in (_TOKENIZER, *_OTHER_FILES) if name not in names]
    if not any(name.startswith(_TEMPLATE) for name in names) and not _has_inner_template(folder):
        missing.append("a chat template")
    if not missing:
        return found
    hint = f"; training needs {_TOKENIZER}" if _TOKENIZER in missing else ""
    return f"{found}; missing: {', '.join(missing)}{hint}"


def _has_inner_template(folder: HFFolder | None) -> bool:
    """Whether tokenizer_config.json holds the chat template, as those of 2024 do."""
    file = folder.path / "tokenizer_config.json" if folder else None
    return file is not None and file.is_file() and f'"{_TEMPLATE}"' in file.read_text("utf-8")


def _dtype_names(plan: ImportPlan) -> str:
    return ", ".join(sorted({plan.dtypes[name] for name in (*plan.tensors, *plan.kept)}))


def _training_state(parameters: int) -> str:
    state = _MASTER_BYTES + _MOMENT_BYTES
    whole = state + _GRADIENT_BYTES
    return (
        f"{human_bytes(parameters * state)} of state in all: float32 weights and AdamW's two "
        f"moments, {state} bytes a parameter; with float32 gradients {whole}, "
        f"{human_bytes(parameters * whole)}"
    )


def _float8(plan: ImportPlan) -> str | None:
    if not plan.scales or plan.block is None:
        return None
    rows, columns = plan.block
    return (
        f"{len(plan.scales)} tensors become bfloat16 (float32 with --dtype float32): values times "
        f"the scales of blocks of {rows} x {columns}"
    )


def _shortened(names: tuple[str, ...]) -> list[str]:
    return list(names) if len(names) < 4 else [*names[:2], f"and {len(names) - 2} more"]


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
