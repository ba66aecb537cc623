"""What a notebook shows of a run and of an evaluation."""

from whet.evaluation.estimators import Estimate
from whet.evaluation.evaluator import Evaluation
from whet.observe.notebook import run_html


def test_a_run_is_a_table_of_its_first_and_last_rows_with_its_curves():
    steps = [{"mode": "train", "step": n, "reward": n / 4, "kl": float("nan")} for n in (1, 2)]
    shown = run_html("2 <steps>", steps, [{"mode": "eval", "step": 2, "reward": 0.125}])
    assert "2 &lt;steps&gt;" in shown and "<th>kl</th>" not in shown
    assert "<tr><th>reward</th><td>0.25</td><td>0.5</td><td>0.125</td><td>0.125</td></tr>" in shown
    assert "data:image/png;base64," in shown


def test_an_evaluation_is_its_table_with_its_examples():
    found = Evaluation(results={"pass@1": Estimate(0.5, 0.25, 4)}, about={"model": "m"}, examples=["best: <b>"])
    shown = found._repr_html_()
    assert "<tr><th>pass@1</th><td>50.0 ±25.0 %</td></tr>" in shown and "<pre>best: &lt;b&gt;</pre>" in shown
