"""`kbtp wireshark`: the KBTP dissector, put into Wireshark's folder of plugins and taken out again."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import click

FILE_NAME = "kbtp.lua"
CANNOT = 2
_ASK_TIMEOUT_S = 30.0
_FOLDER_KIND = "Personal Lua Plugins:"
_USUAL_FOLDER = Path(".local/lib/wireshark/plugins")

_folder = click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="The folder of Lua plugins; without it, the one that tshark names.",
)
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


class _CannotDo(click.ClickException):
    exit_code = CANNOT


@click.group(short_help="Install the Wireshark dissector for KBTP.")
def wireshark() -> None:
    """Install or remove the dissector that shows KBTP in Wireshark and tshark.

    It shows requests, completions, HELLO and HELLO_ACK on top of Wireshark's own iWARP dissectors: filter by `kbtp`.

    \b
    Examples:
      kbtp wireshark install
      kbtp wireshark install --print --folder ~/.local/lib/wireshark/plugins
      kbtp wireshark remove
    """


@wireshark.command(short_help="Put the dissector into Wireshark's folder of plugins.")
@_folder
@click.option("--print", "only_print", is_flag=True, help="Say where it would be, and write nothing.")
@_json
def install(folder: Path | None, only_print: bool, as_json: bool) -> None:
    """Put the dissector into the folder of Lua plugins, over an older one too; Wireshark loads it when it starts."""
    path = (folder or _plugin_folder()) / FILE_NAME
    if not only_print:
        try:
            if path.exists():
                _check_ours(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(dissector())
        except OSError as error:
            raise _CannotDo(f"{path}: {error.strerror}") from error
    _say(path, as_json)


@wireshark.command(short_help="Remove the dissector again.")
@_folder
@_json
def remove(folder: Path | None, as_json: bool) -> None:
    """Remove the dissector from the folder of Lua plugins."""
    path = (folder or _plugin_folder()) / FILE_NAME
    try:
        if not path.exists():
            raise click.ClickException(f"{path} is not there; name the folder that has it with --folder")
        _check_ours(path)
        path.unlink()
    except OSError as error:
        raise _CannotDo(f"{path}: {error.strerror}") from error
    _say(path, as_json)


def _say(path: Path, as_json: bool) -> None:
    click.echo(json.dumps({"path": str(path)}) if as_json else path)


def dissector() -> str:
    """The Lua source."""
    return (resources.files("kbtp") / "wireshark" / FILE_NAME).read_text()


def _check_ours(path: Path) -> None:
    if path.read_text(errors="replace").partition("\n")[0] != dissector().partition("\n")[0]:
        raise _CannotDo(f"{path} is not the dissector, and stays; move it away, or name another folder with --folder")


def _plugin_folder() -> Path:
    if tshark := shutil.which("tshark"):
        try:
            asked = subprocess.run(
                [tshark, "-G", "folders"], capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise _CannotDo(
                f"{tshark} does not say where its plugins are ({error}); name the folder with --folder"
            ) from error
        for line in asked.stdout.splitlines():
            if line.startswith(_FOLDER_KIND):
                return Path(line.removeprefix(_FOLDER_KIND).strip())
    return Path.home() / _USUAL_FOLDER
