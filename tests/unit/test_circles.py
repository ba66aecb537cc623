"""No two files of whet import each other, directly or by way of others; imports for type checking do not count."""

from test_layers import ROOT, imports


def arrows(root=ROOT):
    """Module -> the modules of whet that its file imports, lazy ones included, but not for type checking."""
    names = {".".join(p.relative_to(root).with_suffix("").parts): p for p in (root / "whet").rglob("*.py")}
    files = {name.removesuffix(".__init__"): path for name, path in names.items()}
    found = {}
    for name, path in files.items():
        targets = {module for _, module in imports(path, root)}
        # `from whet.ops import x` is the package; where x is a file of its own, it is that file
        exact = {t for t in targets if t in files and not any(o.startswith(t + ".") and o in files for o in targets)}
        found[name] = exact - {name}
    return found


def circles(graph):
    """The strongly connected parts of more than one module (Tarjan)."""
    index, low, stack, out = {}, {}, [], []

    def visit(v):
        index[v] = low[v] = len(index)
        stack.append(v)
        for w in graph[v]:
            if w not in index:
                visit(w)
                low[v] = min(low[v], low[w])
            elif w in stack:
                low[v] = min(low[v], index[w])
        if low[v] == index[v]:
            part = set()
            while not part or v not in part:
                part.add(stack.pop())
            if len(part) > 1:
                out.append(sorted(part))

    for v in graph:
        if v not in index:
            visit(v)
    return sorted(out)


KNOWN = []
"""To be opened; none may come to it."""


def test_no_file_imports_another_that_imports_it():
    assert circles(arrows()) == KNOWN


def test_a_planted_circle_is_found(tmp_path):
    folder = tmp_path / "whet" / "a"
    folder.mkdir(parents=True)
    (tmp_path / "whet" / "__init__.py").write_text("")
    (folder / "__init__.py").write_text("")
    (folder / "one.py").write_text("from whet.a.two import f\n")
    (folder / "two.py").write_text("from whet.a import three\n")
    (folder / "three.py").write_text("def g():\n    from whet.a.one import h\n")
    assert circles(arrows(tmp_path)) == [["whet.a.one", "whet.a.three", "whet.a.two"]]
