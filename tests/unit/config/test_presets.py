"""Presets as configurations: from Python, from files and from the command line."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import yaml

from whet import presets
from whet.config import (
    GRPOConfig,
    OverlongBuffer,
    PPORunConfig,
    RunConfig,
    dump,
    dump_tree,
    load_run,
)
from whet.config.algo.presets import PRESETS, preset
from whet.errors import ConfigError
from whet.learners.from_config import make_estimator, make_objective

PAGE = Path(__file__).parents[3] / "docs" / "papers.md"


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_can_be_carried_out_and_changed(name):
    function = PRESETS[name]
    assert function is getattr(presets, name) and function.__name__ == name
    made = function()
    make_estimator(made)
    make_objective(made)  # refuses a parameter that nothing takes
    changed = function(num_iterations=3)
    assert changed == dataclasses.replace(made, num_iterations=3) and changed != made
    with pytest.raises(ConfigError, match="did you mean num_iterations"):
        function(num_iteration=3)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_says_its_formula_its_source_and_what_it_can_t_vouch_for(name):
    text = inspect.getdoc(PRESETS[name]) or ""
    assert re.search(r"L = ", text)
    assert "Source: " in text and ">>> " in text


def tables():
    """Preset -> the rows of its table on the page of papers, (field, value) as text."""
    found = {}
    for section in PAGE.read_text().split("\n## ")[1:]:
        rows = re.findall(r"^\| `([\w.]+)` \| `([^`]+)` \|", section, re.M)
        if rows:
            found[re.findall(r"`presets\.(\w+)\(\)`", section)[0]] = rows
    return found


def test_the_page_of_papers_has_every_preset():
    assert set(tables()) == set(PRESETS)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_the_page_of_papers_says_what_a_preset_sets(name):
    made, rows = PRESETS[name](), tables()[name]
    own = {f.name for f in dataclasses.fields(made)}
    for field, value in rows:
        if field in own:
            assert dump_tree(getattr(made, field)) == yaml.safe_load(value), field
        else:
            assert field.split(".")[0] in ("actor", "data", "rollout", "trainer")
            load_run([f"{field}={value}"])


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_name_in_a_file_is_what_the_function_returns(name):
    kind = PPORunConfig if type(PRESETS[name]()) is not GRPOConfig else RunConfig
    assert dump_tree(load_run([f"algo.preset={name}"], kind).algo) == dump_tree(PRESETS[name]())


def test_other_keys_change_a_preset_wherever_they_stand(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("algo: {epsilon: 0.1, preset: dapo, overlong_buffer: {max_response_length: 8192}}\n")
    made = load_run(["--config", str(file), "algo.overlong_buffer.overlong_buffer_penalty=0.5"]).algo
    buffer = OverlongBuffer(enable=True, max_response_length=8192, overlong_buffer_penalty=0.5)
    assert dump_tree(made) == dump_tree(presets.dapo(epsilon=0.1, overlong_buffer=buffer))
    assert load_run(["--config", str(file), "algo.preset=gspo"]).algo.clip_range == (0.1, 4e-4)
    off = load_run(["--config", str(file), "algo.preset=null"]).algo
    assert off.epsilon_high is None and off.overlong_buffer.max_response_length == 8192
    made = RunConfig(algo={"preset": "dapo"})  # pyright: ignore
    assert made == RunConfig(algo=presets.dapo()) and made.algo.num_generations == 16


def test_a_resolved_configuration_has_the_fields_and_not_the_word():
    run = load_run(["algo.preset=dapo", "algo.epsilon=0.1"])
    written = yaml.safe_load(dump(run))
    assert "preset" not in written["algo"] and written["algo"]["epsilon_high"] == 0.28
    assert RunConfig(**{"algo": written["algo"]}).algo == run.algo


def refused(words, kind=RunConfig):
    with pytest.raises(ConfigError) as error:
        load_run(words, kind)
    return str(error.value)


def test_what_is_refused():
    assert "unknown algo.preset 'dapoo'; did you mean dapo" in refused(["algo.preset=dapoo"])
    assert "unknown algo.preset ['dapo']" in refused(["algo.preset=[dapo]"])
    assert "did you mean algo.epsilon" in refused(["algo.preset=dapo", "algo.epsilom=0.1"])
    message = refused(["algo.preset=ppo"])
    assert "algo.preset='ppo' is a PPOConfig, and algo is a GRPOConfig here: train with whet ppo" in message
    assert "whet grpo, or take one of ppo, rl2_ppo" in refused(["algo.preset=dapo"], PPORunConfig)
    with pytest.raises(ConfigError, match=r"GRPOConfig.preset: .* presets\.dapo\(\.\.\.\)"):
        GRPOConfig(preset="dapo")  # pyright: ignore


def test_a_class_of_one_s_own_takes_the_presets_of_its_base():
    from whet.config import config

    @config
    class Own(GRPOConfig):
        """A configuration with a field more."""

    assert preset("gspo", Own) == presets.gspo()
