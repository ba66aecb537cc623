"""The commands that print what whet knows: recipes, docs, schema, completion, env, version."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from whet._version import __version__
from whet.cli.registry import COMMANDS, INFO_COMMANDS, config_class
from whet.errors import ConfigError, lookup_error, nearest
from whet.util.text_lines import shorten_middle

__all__ = ["info_text"]


def info_text(command: str, words: Sequence[str]) -> str:
    """Returns what a command prints. Args: words: behind its name. Raises: ConfigError: a word that it does not
    take.
    """
    import inspect

    try:
        inspect.signature(_PRINTERS[command]).bind(*words)
    except TypeError:
        usage = f"whet {command} {INFO_COMMANDS[command]}".rstrip()
        raise ConfigError(f"{' '.join(words) or 'no word'}: expected {usage}") from None
    return _PRINTERS[command](*words)


def _recipes(word: str = "", name: str = "", folder: str = ".") -> str:
    from whet.util.package_files import copy_recipe, list_recipes, recipe_path

    if not word:
        lines = _format_list(list_recipes())
        return f"{lines}\n\nwhet recipes NAME prints one, whet recipes copy NAME copies it to this folder."
    if word != "copy":
        return recipe_path(word).read_text().rstrip()
    if not name:
        raise ConfigError(f"which recipe? write whet recipes copy NAME; there are {', '.join(list_recipes())}")
    copied = copy_recipe(name, folder)
    command_match = re.search(r"whet (\w+) --config", copied[0].read_text())
    command = f"whet {command_match[1] if command_match else 'grpo'} --config {copied[0]}"
    return f"wrote {', '.join(map(str, copied))}\n  {command}"


def _docs(*words: str) -> str:
    from whet.util.package_files import find_in_pages, list_pages, read_page

    name = " ".join(words)
    if not name:
        return f"{_format_list(list_pages())}\n\nwhet docs NAME prints one, whet docs WORD names those that have it."
    try:
        read_page(name)
    except ConfigError:
        if not (found := find_in_pages(name)):
            near, pages = nearest(name, list_pages()) or ".", ", ".join(list_pages())
            raise ConfigError(f"no page is called {name!r}, and none has that word{near} Pages: {pages}") from None
        lines = _format_list({page: shorten_middle(headings, 90) for page, headings in found.items()})
        return f"No page is called {name}. These have the word, under these headings:\n\n{lines}"
    text = re.sub(r"^(```\w+) skip\b", r"\1", read_page(name).rstrip(), flags=re.MULTILINE)  # a mark for the tests
    return re.sub(r"\]\(([\w-]+)\.md(?:#[^)]*)?\)", r"](whet docs \1)", text)


def _format_list(items: Mapping[str, str]) -> str:
    width = max(map(len, items), default=0)
    return "\n".join(f"{name:{width}}  {text}" for name, text in items.items())


def _schema(command: str = "grpo") -> str:
    from whet.cli.schema import schema_text

    if command not in (known := _config_commands()):
        raise lookup_error("command with a configuration", command, known)
    return schema_text(*config_class(command))


def _config_commands() -> list[str]:
    """Returns the commands with a configuration of their own; data, demo and plan take the keys of others."""
    return [name for name in COMMANDS if name not in (*INFO_COMMANDS, "data", "demo", "plan")]


def _completion(shell: str) -> str:
    """Returns a script for a shell: the commands, and the keys of each."""
    from whet.config.introspection import leaves

    if shell not in _SCRIPTS:
        raise lookup_error("shell", shell, _SCRIPTS)
    keys: dict[str, list[str]] = {name: [] for name in INFO_COMMANDS}
    for name in _config_commands():
        kind, short = config_class(name)
        keys[name] = [f"{key}=" for key in sorted({*(key for key, *_ in leaves(kind, optional=True)), *short})]
    keys |= {
        "demo": keys["grpo"],
        "data": keys["grpo"],
        "plan": keys["grpo"],
        "schema": _config_commands(),
        "completion": list(_SCRIPTS),
    }
    return _SCRIPTS[shell](COMMANDS, keys)


def _bash(commands: Mapping[str, str], keys: Mapping[str, Sequence[str]]) -> str:
    cases = "\n".join(f"    {name}) words='{' '.join(words)}' ;;" for name, words in keys.items() if words)
    return f"""# whet completion bash > ~/.local/share/bash-completion/completions/whet
_whet() {{
  local words='{" ".join(commands)} --help' word="${{COMP_WORDS[COMP_CWORD]}}"
  ((COMP_CWORD > 1)) && words=--config && case "${{COMP_WORDS[1]}}" in
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  [[ "${{COMPREPLY[0]}}" == *= ]] && compopt -o nospace
}}
complete -o default -F _whet whet"""


def _zsh(commands: Mapping[str, str], keys: Mapping[str, Sequence[str]]) -> str:
    cases = "\n".join(f"    {name}) found=({' '.join(found)}) ;;" for name, found in keys.items() if found)
    about = "\n".join(f'    "{name}:{text.replace(":", " -")}"' for name, text in commands.items())
    return f"""#compdef whet
# source <(whet completion zsh) in ~/.zshrc, behind compinit
_whet() {{
  local -a found
  if ((CURRENT == 2)); then
    found=(
{about}
    )
    _describe command found
    return
  fi
  case "$words[2]" in
{cases}
  esac
  compadd -S '' -a found || _files
}}
compdef _whet whet"""


def _fish(commands: Mapping[str, str], keys: Mapping[str, Sequence[str]]) -> str:
    lines = ["# whet completion fish > ~/.config/fish/completions/whet.fish"]
    for name, text in commands.items():
        escaped = text.replace("'", "\\'")
        lines.append(f"complete -c whet -n __fish_use_subcommand -f -a {name} -d '{escaped}'")
        if keys.get(name):
            lines.append(f"complete -c whet -n '__fish_seen_subcommand_from {name}' -a '{' '.join(keys[name])}'")
    return "\n".join(lines)


def _env() -> str:
    """Returns what a bug report needs, as lines of Markdown."""
    from importlib import metadata

    import torch  # noqa: F401  (environment() says its threads and devices where it is imported)

    from whet.native import build
    from whet.observe.environment import collect_environment
    from whet.util import install

    facts = collect_environment()
    versions = facts["versions"]
    kernels = build.load_library("decode")
    extras = {name: version for name in _OPTIONAL if (version := _version(name, metadata)) is not None}
    lines: dict[str, Any] = {
        install.DISTRIBUTION: f"{versions.pop('whet')}, {_commit(install.PACKAGE) or 'not a checkout'}",
        **{name: version or "not installed" for name, version in versions.items()},
        "extras": ", ".join(f"{name} {version}" for name, version in extras.items()) or "none",
        "platform": " ".join(facts["platform"].values()),
        "processor": f"{facts['cpu']['model']}, {facts['cpu']['cores']} cores, {' '.join(facts['cpu']['flags'])}",
        "devices": ", ".join(facts["devices"]) or "no GPU",
        "CUDA of torch": facts["cuda"] or "none",
        "C++ kernels": kernels.compiler if isinstance(kernels, build.Library) else str(kernels),
        "variables": " ".join(f"{k}={v}" for k, v in facts["variables"].items()) or "none",
    }
    if other := install.conflicting_version():
        lines["whet, a stranger's"] = other
    return "\n".join(f"- {name}: {value}" for name, value in lines.items())


def _doctor() -> str:
    from whet.cli.doctor import doctor_text

    return doctor_text()


def _version(name: str, metadata: Any) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit(package: Any) -> str | None:
    """Returns the commit of the checkout, and whether files differ from it; None = it is none."""
    import subprocess

    try:
        result = subprocess.run(
            ["git", "-C", str(package), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    tracked = (package.parent / ".git").exists()
    return f"commit {result.stdout.strip()}" if tracked and result.returncode == 0 else None


_OPTIONAL = ("accelerate", "bitsandbytes", "llguidance", "math-verify", "matplotlib", "peft", "sglang", "tensorboard",
             "tensordict", "torchao", "torchrl", "trackio", "trl", "vllm", "wandb")  # fmt: skip
_SCRIPTS: Mapping[str, Callable[..., str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
_PRINTERS: Mapping[str, Callable[..., str]] = {
    "recipes": _recipes,
    "docs": _docs,
    "schema": _schema,
    "completion": _completion,
    "doctor": _doctor,
    "env": _env,
    "version": lambda: f"whet {__version__}",
}
