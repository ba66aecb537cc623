"""`python -m tools.docs`: writes every generated page."""

from tools.docs import DOCS, PAGES, text_of

if __name__ == "__main__":
    for name in PAGES:
        (DOCS / name).write_text(text_of(name), encoding="utf-8")
