"""The speed of the host at hand, without a card."""

from framework.run.planning.host_probe import REFERENCE, probe_host, shares_of


def test_every_kind_of_call_is_timed_and_none_is_absurd() -> None:
    seconds = probe_host()
    assert set(seconds) == set(REFERENCE)
    assert 1e-7 < seconds["view"] < seconds["operator"] < seconds["graph"] < 1e-1
    assert seconds["python"] < 1e-3


def test_a_host_that_takes_twice_as_long_has_shares_of_two() -> None:
    assert set(shares_of({kind: 2 * time for kind, time in REFERENCE.items()}).model_dump().values()) == {2.0}
