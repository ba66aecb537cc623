"""docs/from-rl2.md, from the table of keys.

python -m whet.rl2.page > docs/from-rl2.md
"""

from __future__ import annotations

import sys

from whet.rl2.keys import KEYS, Key

__all__ = ["page", "usage"]

SAID = {
    "one": "refused above 1",
    "none": "no effect",
    "refused": "refused",
}
"""What stands in the second column where no key of whet's does."""

_INTRO = """# From RL2
"""


def page() -> str:
    """The whole page: what holds of all, and a table for each trainer."""
    parts = [_INTRO]
    for verb, keys in KEYS.items():
        parts += [f"## {verb}\n", "| RL2 | whet | |", "|---|---|---|"]
        parts += [f"| `{name}` | {_place(key)} | {_cell(key.note)} |" for name, key in keys.items()]
        parts.append("")
    return "\n".join(parts)


def _place(key: Key) -> str:
    if key.to:
        return ", ".join(f"`{name.strip()}`" for name in key.to.split(","))
    return SAID.get(key.how, "checked")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def usage(verb: str | None) -> str:
    """Help. Args: verb: of which trainer the keys are listed; None = of none."""
    head = (
        "usage: python -m whet.rl2 ppo [--config FILE ...] [--print_config] [key=value ...]\n\n"
        "RL2's commands with one word changed: RL2.trainer.ppo is whet.rl2 ppo. whet.<key>=value is a key of whet's.\n"
        "--print_config prints whet's configuration as YAML. docs/from-rl2.md says what each key is here."
    )
    if verb is None:
        return head
    lines = [f"  {name}  {key.to or SAID.get(key.how, 'checked')}" for name, key in KEYS[verb].items()]
    return f"{head}\n\nKeys of {verb}, and whet's:\n" + "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(page())
