"""Public names: sorted, importable, documented."""

import ast
import dataclasses
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import whet

ROOT = Path(__file__).parents[2]
MODULES = [
    ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for p in sorted((ROOT / "whet").rglob("*.py"))
    if p.stem != "_version"
]


def as_ruff_sorts(names):
    """SHOUTING first, then Classes, then the rest."""
    return sorted(names, key=lambda n: (0 if n.isupper() else 1 if n[0].isupper() else 2, n))


def literal_all(module):
    """A module's __all__ as written, or the names of its stub: nothing can be made up at run time."""
    path = ROOT / Path(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if (stub := path.with_suffix(".pyi")).is_file():
        body = ast.parse(stub.read_text()).body
        imports = [name.asname for n in body if isinstance(n, ast.ImportFrom) for name in n.names]
        return as_ruff_sorts(imports + [ast.unparse(n.targets[0]) for n in body if isinstance(n, ast.Assign)])
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return ast.literal_eval(node.value)
    return None


def bare_names(module):
    """Public names of a module without a docstring."""
    names = literal_all(module)
    made = importlib.import_module(module)
    assert inspect.getdoc(made), f"{module} has no header"
    if names is None:
        assert module.endswith("__init__") or not [
            n for n, v in vars(made).items() if not n.startswith("_") and getattr(v, "__module__", "") == module
        ], f"{module} has no __all__"
        return
    assert names == as_ruff_sorts(names) and len(set(names)) == len(names), module
    for name in names:
        value = getattr(made, name)
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        doc = value.__doc__ or ""
        if not doc or (dataclasses.is_dataclass(value) and doc.startswith(f"{value.__name__}(")):
            yield f"{module}.{name}"


def bare_methods(module):
    """Public methods of a module's public classes without a docstring."""
    made = importlib.import_module(module)
    for name in literal_all(module) or []:
        value = getattr(made, name)
        if inspect.isclass(value) and value.__module__ == module:
            for n, v in vars(value).items():
                made_here = inspect.isfunction(v) or isinstance(v, property | classmethod | staticmethod)
                function = getattr(v, "fget", None) or getattr(v, "__func__", v)
                if n.startswith("_") or not made_here or function.__module__.startswith("tensordict."):
                    continue  # TensorClass puts its own methods, some of them bare, into a class
                if not inspect.getdoc(function):
                    yield f"{module}.{name}.{n}"


@pytest.mark.parametrize("bare", [bare_names, bare_methods])
def test_all_is_literal_and_sorted_and_every_name_and_method_has_a_docstring(bare):
    assert len(MODULES) > 200 and [name for module in MODULES for name in bare(module)] == []


@pytest.mark.parametrize("package", ["whet", "whet.trl", "whet.tunix", "whet.tunix.agentic"])
def test_lazy_names_are_those_that_type_checkers_read_in_the_stub(package):
    made = importlib.import_module(package)
    assert made.__all__ == sorted(literal_all(package)) == dir(made)
    assert all(getattr(made, name) is not None for name in made.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = whet.nothing


def test_importing_whet_and_its_maths_loads_no_transformers():
    code = "import sys, whet, whet.ops; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_name_of_another_library_is_answered_with_where_it_is():
    with pytest.raises(ImportError, match=r"whet has no GRPOTrainer: from whet\.trl import GRPOTrainer"):
        _ = whet.GRPOTrainer
    trl = importlib.import_module("whet.trl")
    assert set(whet._TRL) <= set(trl.__all__) and not set(whet._MISSING) & set(whet.__all__)


@pytest.mark.parametrize(
    ("make", "word", "said"),
    [
        (whet.RLCluster, "model", "unknown keyword RLCluster.model. Known: actor, critic, "),
        (
            whet.GRPOLearner,
            "reward_funcs",
            "GRPOLearner.reward_funcs; did you mean reward_fns? Known: cluster, algo_con",
        ),
        (whet.PPOLearner, "config", "unknown keyword PPOLearner.config; did you mean ppo_config or algo_config?"),
        (whet.SFTLearner, "args", "unknown keyword SFTLearner.args. Known: models, algo_config, data, "),
        (whet.PreferenceLearner, "config", "unknown keyword PreferenceLearner.config; did you mean algo_config?"),
        (whet.RewardModelLearner, "config", "unknown keyword RewardModelLearner.config; did you mean algo_config?"),
        (whet.SupervisedModels, "model", "SupervisedModels.model. Known: actor, reward_model"),
        (whet.Sampler, "max_tokens", "unknown keyword Sampler.max_tokens"),
    ],
)
def test_a_wrong_keyword_of_a_constructor_is_answered_with_those_that_it_takes(make, word, said):
    needed = [None] * (make not in (whet.RLCluster, whet.SupervisedModels))
    with pytest.raises(whet.ConfigError) as error:
        make(*needed, **{word: None})
    assert said in str(error.value)
