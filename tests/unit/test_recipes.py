"""Every recipe is a configuration that whet takes as it is."""

from pathlib import Path

import pytest

from whet.cli.commands import recipe_path
from whet.config import PPORunConfig, RunConfig, load_run

RECIPES = sorted((Path(__file__).parents[2] / "recipes").rglob("*.yaml"))


def test_there_are_recipes_and_the_command_line_finds_them():
    assert RECIPES
    for path in RECIPES:
        assert recipe_path(path.name).samefile(path)


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.name)
def test_a_recipe_parses_and_its_batches_divide(path):
    command = PPORunConfig if f"whet ppo --config recipes/{path.name}" in path.read_text() else RunConfig
    made = load_run(["--config", str(path)], command)
    assert made.trainer.resolve_batch_sizes(made.data.batch_size).full == made.data.batch_size
    assert made.actor.model and made.data.path and made.reward_names


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.name)
def test_a_recipe_says_its_command_cost_and_expected_number(path):
    head = "".join(line for line in path.read_text().splitlines(True) if line.startswith("#"))
    assert "whet " in head and "cost" in head.lower() and "expect" in head.lower()
