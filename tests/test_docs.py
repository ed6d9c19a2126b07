"""The documents name what is there."""

import ast
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kbtp.cli import cli
from kbtp.cli.serve_index import EMBEDDED, serve_index
from kbtp.errors import KbtpError
from kbtp.rnic import open_rnic
from kbtp.target.config import TargetConfig
from kbtp.target.server import Server
from kbtp.types import Feature

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "python" / "kbtp"


def _names_in(path: Path) -> set[str]:
    """Functions and classes of a module, methods as Class.method."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{item.name}"
                for item in node.body
                if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return found


def test_architecture_names_files_and_functions_that_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    places = re.findall(r"`([a-z_/0-9]+\.py)(?:: ([A-Za-z_.]+))?`", text)
    assert len(places) > 30
    for file, name in places:
        path = PACKAGE / file if (PACKAGE / file).exists() else ROOT / file
        assert path.exists() or list(PACKAGE.rglob(file)), f"docs/architecture.md names {file}"
        if name:
            assert name in _names_in(path), f"docs/architecture.md names {file}: {name}"


def test_readme_names_commands_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"make ([a-z]+)", text):
        assert target in targets, f"README names make {target}"
    for verb in re.findall(r"`kbtp ([a-z]+)", text):
        assert (PACKAGE / "cli" / f"{verb}.py").exists(), f"README names kbtp {verb}"


@pytest.mark.parametrize("verb", sorted(cli.commands))
def test_help_has_examples_and_json_is_there(verb: str) -> None:
    """As README says."""
    command = cli.commands[verb]
    assert "Examples:" in CliRunner().invoke(cli, [verb, "--help"]).stdout
    for one in command.commands.values() if isinstance(command, click.Group) else [command]:
        assert "--json" in [name for option in one.params for name in option.opts], one.name


def test_the_readme_s_settings_file_is_read(tmp_path: Path) -> None:
    [settings] = re.findall(r"```toml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    file = tmp_path / "kbtp.toml"
    file.write_text(settings)
    command = ["serve", "--config", str(file), "--pool-size", "4MiB", "--port", "0", "--rnic", "none"]
    result = CliRunner().invoke(cli, command)
    assert "there is no RNIC named 'none'" in str(result.exception)  # which comes after everything was read and checked


SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.fixture
def cluster() -> Iterator[tuple[Server, str]]:
    """A target with an index on the port behind its own, if one that the system chose has such a neighbour."""
    with ExitStack() as stack:
        for left in reversed(range(5)):
            server = Server(TargetConfig(), open_rnic())
            address = server.listen(port=0)
            server.start()
            stack.callback(server.stop)
            try:
                index = serve_index(EMBEDDED, "", server, address, address.port)
            except KbtpError:
                if not left:
                    raise
            else:
                stack.callback(index.close)
                break
        yield server, str(address)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda snippet: f"{len(snippet)} characters")
def test_the_readme_s_python_runs(snippet: str, cluster: tuple[Server, str]) -> None:
    server, url = cluster
    exec(compile(snippet.replace("kbtp://127.0.0.1", url), "README.md", "exec"), {})
    server.stop()  # every session has ended then
    assert server.target.store.free_blocks == server.config.pool_blocks


def test_the_readme_s_direct_modes_are_used_where_they_are_granted() -> None:
    """Against the target above the same lines send requests, as README says."""
    [snippet] = [one for one in SNIPPETS if "direct=" in one]
    config = TargetConfig(direct=Feature.DIRECT_LOAD | Feature.DIRECT_ALLOC, direct_blocks=64, quota=16)
    server = Server(config, open_rnic())
    address = server.listen(port=0)
    server.start()
    said: dict[str, object] = {}
    try:
        exec(compile(snippet.replace("kbtp://127.0.0.1", str(address)), "README.md", "exec"), said)
    finally:
        server.stop()
    assert said["mode"] == "direct"


CONFIGURATIONS = sorted((ROOT / "tests" / "connectors").glob("*/configuration.*"))


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_connector_s_page_shows_what_its_tests_run_with(path: Path) -> None:
    page = ROOT / "docs" / "connectors" / f"{path.parent.name}.md"
    assert path.read_text().strip() in page.read_text()


def test_every_connector_has_a_page_and_a_configuration_that_is_tested() -> None:
    connectors = {path.parent.name for path in (ROOT / "tests" / "connectors").glob("*/requirements.txt")}
    assert connectors
    assert connectors == {path.stem for path in (ROOT / "docs" / "connectors").glob("*.md")}
    assert connectors == {path.parent.name for path in CONFIGURATIONS}
