"""Pages of docs/ that are made from the code are as the code is."""

import pytest

from tools.docs import DOCS, PAGES, text_of


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_current(name):
    assert (DOCS / name).read_text(encoding="utf-8") == text_of(name), "run: make docs"


@pytest.mark.parametrize("name", PAGES)
def test_prose_ends_at_120_columns(name):
    prose = [line for line in text_of(name).split("\n") if not line.startswith(("|", "#"))]
    assert [line for line in prose if len(line) > 120] == []
