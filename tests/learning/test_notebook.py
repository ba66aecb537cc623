"""The code of the notebook runs as it stands, and what it shows is so."""

import json
from pathlib import Path

NOTEBOOK = Path(__file__).parents[2] / "examples" / "grpo.ipynb"


def test_the_cells_of_the_notebook_run_in_order_and_the_reward_rises(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)  # kept without results
    space = {"__name__": "notebook"}
    for number, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), space)
    rewards = space["rewards"]
    assert len(rewards) == 10 and sum(rewards[-3:]) > 1.5 * sum(rewards[:3])
