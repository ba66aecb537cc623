"""`python -m whet` is `whet`."""

from whet.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    raise SystemExit(main())
