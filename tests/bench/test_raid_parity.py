"""The rate at which one core makes parity: a figure comes out, and never of a wrong parity."""

from __future__ import annotations

from typing import Any

import pytest

from bench.support import raid_parity
from clamor_ray._native import parity


def test_the_figure_is_the_two_rates() -> None:
    found = raid_parity.parity_rate(delta_bytes=2 << 20, passes=40)
    assert set(found) == {"parity_rate", "xor_gb_s", "copy_gb_s"}
    assert min(found.values()) > 0
    assert found["parity_rate"] == pytest.approx(found["xor_gb_s"] / found["copy_gb_s"], rel=0.5)


def test_a_wrong_parity_has_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    def copies(out: Any, other: Any) -> None:
        out[:] = other

    monkeypatch.setattr(parity, "xor_into", copies)
    with pytest.raises(RuntimeError, match="not the XOR"):
        raid_parity.parity_rate(delta_bytes=1 << 20, passes=1)
