"""`clamor`: what sessions do, from a shell. docs/cli.md has all commands.

A command is imported when it is called: `clamor fsck` needs no Ray.
"""

from __future__ import annotations

import importlib
import sys
from typing import Final

try:
    import click
    import rich  # noqa: F401
except ImportError as missing:
    sys.stderr.write(f"clamor: {missing.name} is not here: pip install 'clamor-ray[cli]'\n")
    sys.exit(2)

from clamor_ray._version import __version__

COMMANDS: Final = {
    "status": "clamor_ray.cli.status",
    "top": "clamor_ray.cli.top",
    "inspect": "clamor_ray.cli.inspect",
    "timeline": "clamor_ray.cli.timeline",
    "drain": "clamor_ray.cli.drain",
    "doctor": "clamor_ray.cli.doctor",
    "fsck": "clamor_ray.cli.fsck",
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(COMMANDS[cmd_name]).command
        assert isinstance(command, click.Command)
        return command


@click.command(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="clamor")
def main() -> None:
    """Global variables for Ray: what sessions do.

    Exit status of each command: 0, all is well; 1, something is wrong; 2, it could not be asked.
    """


if __name__ == "__main__":
    main(prog_name="clamor")
