"""`rlstreams completion bash|zsh`: completes commands, options, choices and fields."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

from rlstreams.cli.arguments import Commands, command

_ZSH = """\
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }
autoload -Uz bashcompinit && bashcompinit
"""
_SCRIPT = """\
_rlstreams() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" words= fields=
  [[ "$cur" == --?* ]] && fields="$_rlstreams_fields"
  case "${{COMP_WORDS[*]:1:$((COMP_CWORD - 1))}} " in
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
_rlstreams_fields="{fields}"
complete -o default -F _rlstreams rlstreams
"""


def add(subparsers: Commands) -> None:
    """Register the command."""
    parser = command(
        subparsers,
        "completion",
        partial(run, subparsers),
        """
        print a script that completes commands, options and fields in a shell

        Write it to a file, and `source` that file in ~/.bashrc or ~/.zshrc.

        rlstreams completion bash > ~/.rlstreams-completion
        rlstreams completion zsh > ~/.rlstreams-completion
        """,
    )
    parser.add_argument("shell", choices=("bash", "zsh"), metavar="SHELL", help="bash, zsh")


def run(commands: Commands, args: argparse.Namespace) -> int:
    """Print it."""
    from rlstreams.workers.config.docs import field_docs

    cases = [f'  " "*) words="{" ".join(commands.choices)} --version --help" ;;']
    for name, parser in commands.choices.items():
        nested = next(
            (a for a in parser._actions if isinstance(a, argparse._SubParsersAction)), None
        )
        for action, inner in nested.choices.items() if nested else ():
            cases.append(_case(f'"{name} {action} "*', inner))
        cases.append(_case(f'"{name} "*', parser))
    fields = " ".join(f"--{doc.name}" for doc in field_docs() if "[]" not in doc.name)
    head = _ZSH if args.shell == "zsh" else ""
    print(head + _SCRIPT.format(cases="\n".join(cases), fields=fields), end="")
    return 0


def _case(pattern: str, parser: argparse.ArgumentParser) -> str:
    fields = " $fields" if any(a.dest == "config" for a in parser._actions) else ""
    return f'  {pattern}) words="{" ".join(_words(parser))}{fields}" ;;'


def _words(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Options that are told of, choices, actions."""
    for action in parser._actions:
        if action.help != argparse.SUPPRESS:
            yield from (option for option in action.option_strings if option.startswith("--"))
            yield from map(str, action.choices or ())
