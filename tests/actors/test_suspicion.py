"""φ of a peer that is silent, against the normal distribution of the standard library."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clamor_ray.actors.lost_homes import suspicion
from clamor_ray.actors.lost_homes.suspicion import Suspicion, phi_of

PERIOD_S = 0.5
intervals = st.lists(st.floats(0.0, 3.0), min_size=3, max_size=150)


def plain(intervals_s: list[float], silent_s: float) -> float:
    """The paper's formula, with the deviation that the detector takes at least."""
    mean_s = statistics.fmean(intervals_s)
    std_s = max(suspicion.LEAST_STD_S, statistics.pstdev(intervals_s))
    later = 1.0 - statistics.NormalDist(mean_s, std_s).cdf(silent_s)
    return -math.log10(later)


def heard(intervals_s: list[float]) -> tuple[Suspicion, float]:
    """A peer that has answered so, and when it was last."""
    peer, now_s = Suspicion(PERIOD_S, 0.0), 0.0
    for each in intervals_s:
        now_s += each
        peer.heard(now_s)
    return peer, now_s


@given(st.floats(-4.0, 5.0), st.floats(0.0, 10.0), st.floats(0.01, 10.0))
def test_it_is_the_formula_of_the_paper(z: float, mean_s: float, std_s: float) -> None:
    silent_s = mean_s + z * std_s
    later = 1.0 - statistics.NormalDist(mean_s, std_s).cdf(silent_s)
    assert phi_of(silent_s, mean_s, std_s) == pytest.approx(-math.log10(later), abs=1e-6)


def test_far_out_it_still_grows() -> None:
    """Where 1 - cdf is 0 for a float."""
    found = [phi_of(0.1 * tenths, 0.0, 1.0) for tenths in range(600)]
    assert found == sorted(found)
    assert found[200] == pytest.approx(88.56, abs=0.01)  # of the tables: Q(20) = 2.75e-89
    assert found[-1] == math.inf


@given(st.lists(st.floats(0.3, 0.7), min_size=110, max_size=150), st.floats(0.0, 1.0))
def test_the_last_hundred_intervals_count(intervals_s: list[float], silent_s: float) -> None:
    peer, now_s = heard(intervals_s)
    expected = plain(intervals_s[-suspicion.REMEMBERED :], silent_s)
    assert peer.phi(now_s + silent_s) == pytest.approx(expected, rel=1e-3, abs=1e-6)


@given(intervals, st.lists(st.floats(0.0, 5.0), min_size=2, max_size=10))
def test_it_grows_with_silence_and_an_answer_ends_it(
    intervals_s: list[float], later_s: list[float]
) -> None:
    peer, now_s = heard(intervals_s)
    found = [peer.phi(now_s + each) for each in sorted(later_s)]
    assert found == sorted(found)
    assert all(each >= 0.0 for each in found)
    now_s += max(later_s)
    peer.heard(now_s)
    assert peer.phi(now_s) < 1.0
    assert peer.silent_s(now_s) == 0.0


@given(intervals, st.floats(0.0, 60.0), st.floats(0.0, 1.0))
def test_the_own_absence_is_nobodys_silence(
    intervals_s: list[float], away_s: float, silent_s: float
) -> None:
    one, now_s = heard(intervals_s)
    other, _ = heard(intervals_s)
    other.pardon(away_s, now_s + away_s)
    assert other.phi(now_s + away_s + silent_s) == pytest.approx(
        one.phi(now_s + silent_s), rel=1e-3, abs=1e-6
    )


def test_an_answer_that_waited_through_the_own_absence_does_not_blind() -> None:
    peer, now_s = heard([PERIOD_S] * 50)
    now_s += 10.0
    peer.heard(now_s)  # it was in the queue
    peer.pardon(9.9, now_s)
    assert peer.silent_s(now_s + 2.0) == pytest.approx(2.0)
    assert peer.phi(now_s + 2.0) > suspicion.EXAMINED_PHI


def test_a_regular_peer_is_looked_after_within_seconds() -> None:
    peer, now_s = heard([PERIOD_S] * 200)
    assert peer.phi(now_s + 0.9) < suspicion.AVOIDED_PHI
    assert suspicion.AVOIDED_PHI < peer.phi(now_s + 1.0) < suspicion.EXAMINED_PHI
    assert peer.phi(now_s + 1.1) > suspicion.EXAMINED_PHI


def test_one_outage_does_not_blunt_it() -> None:
    peer, now_s = heard([*[PERIOD_S] * 100, 60.0, *[PERIOD_S] * 5])
    assert peer.phi(now_s + 1.2) > suspicion.EXAMINED_PHI


def test_a_peer_that_has_become_slow_is_got_used_to() -> None:
    peer, now_s = heard([*[PERIOD_S] * 100, *[2.0] * 200])
    assert peer.phi(now_s + 2.0) < 1.0
    assert peer.phi(now_s + 2.7) > suspicion.EXAMINED_PHI


def test_a_jittery_peer_is_suspected_later() -> None:
    random_ = random.Random(7)
    jittery, now_s = heard([random_.uniform(0.1, 2.0) for _ in range(300)])
    assert jittery.phi(now_s + 2.0) < suspicion.AVOIDED_PHI
    assert jittery.phi(now_s + 4.5) > suspicion.EXAMINED_PHI


def test_two_arrivals_at_a_time_and_clocks_that_go_back_do_no_harm() -> None:
    peer = Suspicion(PERIOD_S, 10.0)
    for now_s in (10.0, 10.0, 9.0):
        peer.heard(now_s)
    assert peer.silent_s(9.5) == 0.0
    assert peer.phi(9.5) < 1.0
    assert peer.silent_s(10.5) == 0.5


def test_the_mark_of_eight() -> None:
    assert pytest.approx(5.612, abs=1e-3) == suspicion.Z_OF_EXAMINED
