"""What the environment says about old versions."""

from __future__ import annotations

import pytest

from clamor_ray._protocol.config import Config


def test_history_settings() -> None:
    assert Config.from_env({}) == Config()
    config = Config.from_env(
        {
            "CLAMOR_HISTORY_BYTES": "0",
            "CLAMOR_HISTORY_DISK_BYTES": "1048576",
            "CLAMOR_HISTORY_DIR": "/var/tmp",
        }
    )
    assert (config.history_bytes, config.history_disk_bytes) == (0, 1 << 20)
    assert config.history_dir == "/var/tmp"


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("CLAMOR_HISTORY_BYTES", "-1"),
        ("CLAMOR_HISTORY_BYTES", "1e9"),
        ("CLAMOR_HISTORY_DISK_BYTES", str(1 << 62)),
        ("CLAMOR_HISTORY_DIR", "here"),
    ],
)
def test_history_settings_that_make_no_sense(variable: str, text: str) -> None:
    with pytest.raises(ValueError, match=variable):
        Config.from_env({variable: text})
