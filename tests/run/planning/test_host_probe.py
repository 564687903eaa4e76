"""The speed of the host at hand, without a card."""

import pytest

from framework.run.planning import host_probe
from framework.run.planning.host_probe import REFERENCE, HostSpeed, probe_host, shares_of


def test_every_kind_of_call_is_timed_and_none_is_absurd(monkeypatch) -> None:
    monkeypatch.setattr(host_probe, "SLICE_SECONDS", 0.1)
    speed = probe_host(slices=2)
    assert set(speed.seconds) == set(REFERENCE)
    assert 1e-7 < speed.seconds["view"] < speed.seconds["operator"] < speed.seconds["graph"] < 1e-1
    assert speed.seconds["python"] < 1e-3
    assert speed.variation >= 1


def test_a_host_of_two_speeds_has_the_mean_of_both_in_every_kind(monkeypatch) -> None:
    """It is slow for two of four stretches; that a call takes long now and then counts little."""
    stretches = iter([1.0, 1.7, 1.7, 1.0])
    monkeypatch.setattr(host_probe, "_stretch", lambda timed, took=stretches: dict.fromkeys(timed, 1e-6 * next(took)))
    speed = probe_host(slices=4)
    assert speed.seconds == pytest.approx(dict.fromkeys(REFERENCE, 1.35e-6))
    assert speed.variation == pytest.approx(1.7)


def test_a_host_that_takes_twice_as_long_has_shares_of_two() -> None:
    speed = HostSpeed({kind: 2 * time for kind, time in REFERENCE.items()}, 1.0)
    assert set(shares_of(speed).model_dump().values()) == {2.0}
