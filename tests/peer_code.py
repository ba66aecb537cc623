"""Statements of an installed peer's source, run as they are, where they lie inside a method of 600 lines; and a
stand-in for the trainer that a method asks for.
"""

import ast
import collections
import functools
import importlib
import importlib.util
import types
from pathlib import Path

import pytest


def source(package, file):
    """The syntax tree of a file of an installed package, which is not imported; the test is skipped without it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    return ast.parse((Path(spec.origin).parent / file).read_text())


def run(statements, names):
    """The names that there are after running statements with these names."""
    found = dict(names)
    exec(compile(ast.Module(list(statements), []), "peer", "exec"), found)  # of a package that the user installed
    return found


def function(tree, name, **names):
    """A function of a file, with the names that it uses."""
    node = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name)
    return run([node], names)[name]


def statements_from(tree, name, count):
    """So many statements, beginning with the first that assigns to a name, or is `if` with a test that contains it."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for i, statement in enumerate(body if isinstance(body, list) else ()):
            assigns = isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == name
            if assigns or (isinstance(statement, ast.If) and name in ast.unparse(statement.test)):
                return body[i : i + count]
    raise AssertionError(f"nothing assigns to {name}, or tests it")


def trl_trainer(module, name, *, epsilon=0.2, epsilon_high=None, level="token", parts=1, longest=6, **fields):
    """What TRL's _compute_loss asks of its trainer; extra fields are its own, or those of its arguments."""
    trainer = getattr(pytest.importorskip("trl") and importlib.import_module(module), name)
    args = {"delta": None, "use_bias_correction_kl": False, "steps_per_generation": parts}
    args |= {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
    args |= {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
    same = lambda value, **_: value
    own = types.SimpleNamespace(
        accelerator=types.SimpleNamespace(num_processes=1, gather=same, reduce=same),
        args=types.SimpleNamespace(**{k: fields.pop(k, v) for k, v in args.items()}),
        model=types.SimpleNamespace(training=True),
        epsilon_low=epsilon,
        epsilon_high=epsilon if epsilon_high is None else epsilon_high,
        importance_sampling_level=level,
        current_gradient_accumulation_steps=parts,
        max_completion_length=longest,
        beta=0.0,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        vllm_importance_sampling_correction=fields.get("use_vllm", False),
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": collections.defaultdict(list)},
        get_gamma_weights=getattr(trainer, "get_gamma_weights", None),
        **{"use_vllm": False, "loss_type": "grpo", **fields},
    )
    own.run = functools.partial(trainer._compute_loss, own, None)
    return own
