"""What stands around the reading of rows, and what it needs to end."""

from whet.data import files, read_errors


def test_rows_that_are_still_open_are_closed_without_a_word_as_python_ends(tmp_path, monkeypatch):
    """As Python ends, a module's names are None before what it made is closed."""
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    opened = [
        read_errors.iterate_rows(iter([1, 2]), "rows"),
        iter(files._convert_file_errors(tmp_path / "a.jsonl").gen),
    ]
    for rows in opened:
        next(rows)
    for module in (read_errors, files):
        monkeypatch.setattr(module, "WhetError", None)
    for rows in opened:
        rows.close()
