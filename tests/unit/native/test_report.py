"""`python -m whet.native` prints what runs on this machine, and why not."""

import pytest

from whet.native import __main__ as report
from whet.native.build import Unavailable


class Kernels:
    compiler = "g++ 13"


@pytest.mark.parametrize("off", [(), ("layers",), ("decode", "segments", "layers")])
def test_each_family_is_named_with_what_runs_it(monkeypatch, capsys, off):
    loads = {n: (lambda n=n: Unavailable("no compiler") if n in off else Kernels()) for n in report.FAMILIES}
    monkeypatch.setattr(report, "FAMILIES", {n: (what, loads[n]) for n, (what, _) in report.FAMILIES.items()})
    assert report.main() == int(bool(off))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["decode", "segments", "layers"]
    for line in lines:
        assert line.endswith("torch (no compiler)" if line.split()[0] in off else "native (g++ 13)")


def test_what_is_built_here_is_what_it_says(capsys):
    code = report.main()
    said = capsys.readouterr().out
    for _, load in report.FAMILIES.values():
        found = load()
        assert (found.reason if isinstance(found, Unavailable) else found.compiler) in said
    assert code == int(any(isinstance(load(), Unavailable) for _, load in report.FAMILIES.values()))
