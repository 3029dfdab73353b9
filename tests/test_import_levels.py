"""Imports only go downwards: every module has a level and imports from its own or lower ones."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEVELS = {
    **dict.fromkeys(
        (
            "__init__",
            "errors",
            "paths",
            "compilation_cache",
            "mesh",
            "layout",
            "initialize",
            "host_memory",
            "labels",
        ),
        0,
    ),
    **dict.fromkeys(
        ("config", "run_config", "presets", "schema", "yaml_file", "run_file", "cli"), 0
    ),
    **dict.fromkeys(("devices", "local_gpus"), 0),
    **dict.fromkeys(("ops", "optim", "data", "flops"), 1),
    "layers": 2,
    **dict.fromkeys(
        ("model", "mtp", "cache", "checkpoint", "checkpoint_arrays", "checkpoint_files"), 3
    ),
    **dict.fromkeys(("train", "bench", "plan", "evaluate", "generate"), 4),
}
TOP_LEVEL = 4
MODEL_CLASS = re.compile(r"^(Auto)?Model|Model$|For[A-Z]|^models$|^modeling_")


def imported_names(source: str, package: str) -> list[str]:
    """Dotted names of all that a module of `package` imports, in functions too."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(parents if node.level else []), *filter(None, [node.module])])
            names += [f"{base}.{alias.name}" for alias in node.names]
    return names


def complaint(importer: str, name: str) -> str | None:
    """Why the module with the dotted name `importer` must not import `name`; None when it may."""
    root, *rest = name.split(".")
    inside_jaxseek = importer.split(".")[0] == "jaxseek"
    level = LEVELS.get(importer.split(".")[1], TOP_LEVEL) if inside_jaxseek else TOP_LEVEL - 1
    if root == "jaxseek" and rest and rest[0] in LEVELS and LEVELS[rest[0]] > level:
        return f"level {LEVELS[rest[0]]}, but {importer} may import up to level {level}"
    if not inside_jaxseek or level == TOP_LEVEL:
        return None
    if root in ("convert", "torch"):
        return f"only modules of level {TOP_LEVEL} may import {root}"
    if root == "transformers" and (not rest or any(MODEL_CLASS.search(part) for part in rest)):
        return "import names from transformers, and none of its model classes"
    return None


def modules() -> dict[str, Path]:
    """Dotted name -> file of every module of jaxseek and convert; `name.__init__` for a package."""
    files = [path for package in ("jaxseek", "convert") for path in (ROOT / package).rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sorted(files)}


def test_every_module_of_jaxseek_has_a_level():
    names = {name.split(".")[1] for name in modules() if name.startswith("jaxseek.")}
    assert names <= LEVELS.keys(), f"needs a level in LEVELS here: {sorted(names - LEVELS.keys())}"


def test_imports_only_go_downwards():
    complaints = [
        f"{importer} imports {name}: {reason}"
        for importer, path in modules().items()
        for name in imported_names(path.read_text("utf-8"), importer.rpartition(".")[0])
        if (reason := complaint(importer, name))
    ]
    assert not complaints, "\n" + "\n".join(complaints)


@pytest.mark.parametrize(
    ("importer", "source", "allowed"),
    [
        ("jaxseek.layers.moe", "from jaxseek.ops import router", True),
        ("jaxseek.layers.moe", "from jaxseek import ops", True),
        ("jaxseek.layers.moe", "from ..ops.router import route", True),
        ("jaxseek.layers.moe", "from .mlp import Mlp", True),
        ("jaxseek.ops.router", "from jaxseek import layers", False),
        ("jaxseek.ops.router", "def f():\n    import jaxseek.train.loop", False),
        ("jaxseek.ops.router", "from ..layers import moe", False),
        ("jaxseek.model", "from .train import step", False),
        ("jaxseek.data.tokenizer", "from transformers import PreTrainedTokenizerFast", True),
        ("jaxseek.data.tokenizer", "from transformers import AutoModelForCausalLM", False),
        ("jaxseek.data.tokenizer", "from transformers.models.llama import LlamaConfig", False),
        ("jaxseek.data.tokenizer", "import transformers", False),
        ("jaxseek.checkpoint", "import torch.nn", False),
        ("jaxseek.checkpoint", "from convert import names", False),
        ("jaxseek.evaluate", "from convert import to_jax", True),
        ("convert.to_jax", "from jaxseek.model import Transformer", True),
        ("convert.to_jax", "from jaxseek.train import state", False),
        ("convert.verify", "import torch", True),
    ],
)
def test_the_rule_tells_allowed_from_forbidden_imports(importer, source, allowed):
    names = imported_names(source, importer.rpartition(".")[0])
    assert all(complaint(importer, name) is None for name in names) == allowed
