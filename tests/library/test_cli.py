"""What commands show, without a cluster; tests/cluster/test_cli_lab.py has the rest."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from clamor_ray._observe.stats import EngineStats, NodeStats, Stats
from clamor_ray._protocol.messages import ServerInfo
from clamor_ray._session.begin import tokens
from clamor_ray._session.variables import VariableInfo
from clamor_ray.cli import clusters, fsck
from clamor_ray.cli.inspect import shade, variable_of
from clamor_ray.cli.main import COMMANDS, main
from clamor_ray.cli.output import NotAskedError
from clamor_ray.cli.status import troubles
from tests.support.lab.auth import authenticated

ROOT = Path(__file__).parents[2]


def info(name: str | None, region: int) -> VariableInfo:
    return VariableInfo(name, region, 0, "", 0, ())


def test_a_name_goes_before_an_id() -> None:
    known = [info(None, 7), info("7", 8), info("x", 9)]
    assert variable_of(known, "7").region == 8
    assert variable_of(known, "9").name == "x"
    with pytest.raises(NotAskedError, match=r"'y'\. Names: 7, x\."):
        variable_of(known, "y")


@pytest.mark.parametrize(
    ("counts", "blocks", "expected"),
    [
        ([], 1.0, ""),
        ([0, 1], 1.0, " █"),
        ([1, 999, 500, 250], 1000.0, "░▓▒░"),
        ([5], 1.0, "█"),  # more than a bucket has
    ],
)
def test_shades(counts: list[int], blocks: float, expected: str) -> None:
    assert shade(counts, blocks) == expected


def node(error: str = "", damaged: int = 0) -> NodeStats:
    server = ServerInfo.__new__(ServerInfo)
    object.__setattr__(server, "node_id", "ab" * 28)
    return NodeStats(server, EngineStats(damaged_blocks=damaged), error=error)


def test_troubles() -> None:
    well = Stats(nodes=(node(),))
    assert troubles(well) == []
    lost_ones = {9: "Variable 9 is lost.", 3: "Variable 3 lacks blocks."}
    wrong = Stats(nodes=(node("it is gone."), node("", 3)), lost=lost_ones, degraded=5)
    *lost, degraded, silent, damaged = troubles(wrong)
    assert lost == ["Variable 3 lacks blocks.", "Variable 9 is lost."]
    assert degraded.startswith("5 pieces would not survive")
    assert silent == "Page server of node abababababab did not answer: it is gone."
    assert "3 damaged blocks: run clamor fsck" in damaged


def test_each_command_has_help_and_a_wrong_one_is_named() -> None:
    run = CliRunner().invoke
    said = run(main, ["--help"])
    assert said.exit_code == 0
    for name in COMMANDS:
        assert name in said.output
        assert "Exit status" in run(main, [name, "--help"]).output
    assert run(main, ["nothing"]).exit_code == 2
    for timeout in ("0", "inf", "nan", "x"):
        assert run(main, ["status", "--timeout", timeout]).exit_code == 2
    assert run(main, ["drain", ""]).exit_code == 2
    assert run(main, ["drain", "x", "--this-node"]).exit_code == 2
    for address in ("local", "ray://127.0.0.1:10001"):
        said = run(main, ["status", "--address", address])
        assert said.exit_code == 2
        assert "HOST:PORT of a cluster that runs" in said.output
    said = run(main, ["status", "--address", "127.0.0.1:99999"])
    assert said.exit_code == 2
    assert "there is no port 99999" in said.output


@pytest.mark.timeout(60)
def test_a_host_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long its answers may take: here, longer than the test."""
    monkeypatch.setattr(clusters, "ACCEPTS_S", 0.5)
    with socket.socket() as silent, socket.socket() as first:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)  # one connection waits to be accepted; to the next the kernel says nothing
        first.connect(silent.getsockname())
        host, port = silent.getsockname()
        with (
            pytest.raises(NotAskedError, match=f"answers at {host}:{port}: TimeoutError"),
            clusters.connected(f"{host}:{port}", 600.0),
        ):
            pass


@pytest.mark.timeout(25)
def test_a_host_that_accepts_and_says_nothing_is_soon_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray's client waits for it for 40 s, in which no thread could end the process."""
    from ray._raylet import Config

    monkeypatch.setattr(tokens, "ANSWER_S", 1)
    before = Config.py_gcs_connect_timeout_s()
    with authenticated(), socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        host, port = silent.getsockname()
        tokens.check_token(f"{host}:{port}")
    assert Config.py_gcs_connect_timeout_s() == before > 1


def test_fsck_says_json(tmp_path: Path) -> None:
    said = CliRunner().invoke(fsck.command, [str(tmp_path / "none"), "--format", "json"])
    assert said.exit_code == 2
    assert "none" in json.loads(said.output)["error"]


def test_fsck_needs_no_ray() -> None:
    imports = "import sys, clamor_ray.cli.main, clamor_ray.cli.fsck"
    code = f"{imports}; print('ray' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
