"""Who may import whom: each module may import modules of its own layer and of those before it."""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAYERS = [
    {"errors", "_version"},
    {"util", "types", "metrics", "config"},
    {"storage"},
    {"observe", "native"},
    {"ops"},
    {"data", "models", "packing", "parallel"},
    {"rollout"},
    {"rewards", "envs"},
    {"serve"},
    {"train"},
    {"hub"},
    {"run"},
    {"evaluation"},
    {"cluster"},
    {"learners"},
    {"demo", "report"},
    {"cli", "__main__", "trl", "torchrl", "rl2", "tunix", "compat"},
]
RANK = {name: i for i, layer in enumerate(LAYERS) for name in layer}


def imports(path, root=ROOT):
    """(line, module) of every import in a file, lazy ones included; those under `if TYPE_CHECKING:` are not."""
    package = path.relative_to(root).with_suffix("").parts
    tree = ast.parse(path.read_text())
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    typing_only = {id(node) for block in blocks for line in block.body for node in ast.walk(line)}
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield node.lineno, base
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def own(module):
    """The part of whet that a module belongs to, a file of a part where that has a layer of its own; None outside."""
    parts = module.split(".")
    if parts[0] != "whet" or len(parts) == 1:
        return None
    return file if (file := ".".join(parts[1:3])) in RANK else parts[1]


def crossings(root=ROOT):
    for path in sorted((root / "whet").rglob("*.py")):
        part = own(".".join(path.relative_to(root).with_suffix("").parts))
        if part == "__init__":
            continue
        for line, module in imports(path, root):
            if own(module) in RANK and RANK[own(module)] > RANK[part]:
                yield f"{path.relative_to(root)}:{line} ({part}) imports {module}"


def imported(folder, forbidden):
    """What of the forbidden a folder of whet imports, as "file:line module"."""
    return [
        f"{path.name}:{line} {module}"
        for path in (ROOT / "whet" / folder).rglob("*.py")
        for line, module in imports(path)
        if module.startswith(forbidden)
    ]


def test_every_part_of_whet_has_a_layer():
    parts = {p.stem for p in (ROOT / "whet").iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file()}
    assert parts - {"__init__"} <= set(RANK), "give the new part a place in LAYERS"


def test_imports_go_to_lower_layers_only():
    assert list(crossings()) == []


def test_a_planted_import_is_caught(tmp_path):
    (tmp_path / "whet" / "ops").mkdir(parents=True)
    (tmp_path / "whet" / "ops" / "x.py").write_text("def f():\n    from whet.learners import grpo\n")
    (tmp_path / "whet" / "types.py").write_text(
        "from . import cluster\nfrom .errors import DataError\nif TYPE_CHECKING:\n    from .learners import grpo\n"
    )
    found = sorted(set(crossings(tmp_path)))
    assert [f.split(" imports ")[1] for f in found] == ["whet.learners", "whet.learners.grpo", "whet.cluster"]


def test_ops_import_only_torch_types_errors_and_the_standard_library():
    allowed = ("torch", "whet.ops", "whet.types", "whet.errors")
    bad = [
        f"{path.name}:{line} {module}"
        for path in (ROOT / "whet" / "ops").rglob("*.py")
        for line, module in imports(path)
        if not module.startswith(allowed) and module.split(".")[0] not in sys.stdlib_module_names
    ]
    assert bad == []


def test_learners_know_neither_parallelism_nor_engines():
    forbidden = ("whet.parallel", "torch.distributed", "whet.rollout.engine", "whet.rollout.hf", "whet.rollout.vllm")
    assert imported("learners", forbidden) == []


def test_config_and_cli_import_nothing_heavy_anywhere():
    heavy = ("torch", "transformers", "datasets", "pandas", "pyarrow")
    light = (ROOT / "whet" / "cli" / "__init__.py", ROOT / "whet" / "errors.py")
    files = [*(ROOT / "whet" / "config").rglob("*.py"), *light]
    bad = [f"{p.name}:{line} {m}" for p in files for line, m in imports(p) if m.split(".")[0] in heavy]
    assert bad == []


def test_the_front_for_trl_needs_neither_it_nor_accelerate():
    assert imported("trl", ("trl", "accelerate")) == []


def test_a_run_knows_no_learner_no_cluster_and_no_reward():
    forbidden = ("whet.learners", "whet.cluster", "whet.rewards", "whet.rollout", "whet.data")
    assert imported("run", forbidden) == []


def test_the_torchrl_front_is_made_of_ops_and_needs_tensordict_alone():
    allowed = ("torch", "tensordict", "whet.torchrl", "whet.ops", "whet.errors", "whet.util.install")
    found = {m for p in (ROOT / "whet" / "torchrl").glob("*.py") for _, m in imports(p)}
    tops = {m for m in found if m.split(".")[0] not in sys.stdlib_module_names}
    assert "tensordict" in tops and [m for m in tops if not (m + ".").startswith(tuple(f"{a}." for a in allowed))] == []
