"""What the three probes say, for every state."""

from __future__ import annotations

import asyncio
import threading

import pytest

from stallwatch.control import probes
from stallwatch.control.service import Liveness
from stallwatch.lifecycle.states import SERVING, UNHEALTHY, State
from stallwatch.testing.service import FakeService, engine_view

LIVE = Liveness(live=True, loops=(("judge", 0.1),))
DEAD = Liveness(live=False, loops=(("judge", 7.0),), detail="judge last turned 7.0 s ago")


def known(*engines, live=LIVE):
    return probes.Known(live, tuple(engines), 0.0)


@pytest.mark.parametrize("state", list(State))
def test_livez_knows_no_engine(state):
    """/livez is about our own loops only: no engine's state changes it."""
    assert probes.livez(known(engine_view(state=state)), 0.0).ok


@pytest.mark.parametrize("state", list(State))
def test_readyz_follows_the_engine(state):
    """/readyz says yes exactly in the states that serve."""
    assert probes.readyz(known(engine_view(state=state)), 0.0).ok is (state in SERVING)


@pytest.mark.parametrize("state", list(State))
def test_healthz_is_503_only_when_broken(state):
    """/healthz fails exactly in the four broken states."""
    assert probes.healthz(known(engine_view(state=state)), 0.0).ok is (state not in UNHEALTHY)


def test_one_ready_engine_is_enough_for_readyz():
    """A second engine that loads does not take the first out of rotation."""
    found = probes.readyz(known(engine_view("a"), engine_view("b", State.STARTING)), 0.0)

    assert found.ok


def test_a_healthy_engine_does_not_mask_a_broken_one():
    """/healthz fails when any engine is broken, and its word is that engine's."""
    found = probes.healthz(known(engine_view("a"), engine_view("b", State.STALLED)), 0.0)

    assert (found.ok, found.word) == (False, "stalled")


@pytest.mark.parametrize(
    ("states", "word"),
    [
        ((), "stopped"),
        ((State.READY, State.STARTING), "loading"),
        ((State.READY, State.BACKOFF), "restarting"),
        ((State.READY, State.SUSPECT), "ready"),
        ((State.DRAINING, State.READY), "draining"),
    ],
)
def test_word_is_the_worst(states, word):
    """The word for several engines is that of the worst of them."""
    assert probes.word_of([engine_view(str(i), s) for i, s in enumerate(states)]) == word


def test_dead_loops_fail_livez_and_healthz_but_not_readyz():
    """A judge that does not turn is not live; the engine may still serve."""
    state = known(engine_view(), live=DEAD)

    assert not probes.livez(state, 0.0).ok
    assert not probes.healthz(state, 0.0).ok
    assert probes.readyz(state, 0.0).ok


def test_reports_in_memory_only_are_a_line_and_change_no_status():
    """Everything serves on: /healthz stays as it is, and only who may read reasons reads a path."""
    live = Liveness(live=True, reports="/srv/state is full")
    state = known(engine_view(), live=live)
    found = probes.healthz(state, 0.0)
    assert (found.ok, found.word) == (True, "ready")
    line = "[-]reports failed: kept in memory only (/srv/state is full)"
    assert line in found.text(verbose=True).splitlines()
    bare = probes.healthz(state, 0.0, reasons=False).text(verbose=True)
    assert "[-]reports failed: kept in memory only" in bare.splitlines()


def test_verbose_lines():
    """?verbose prints one line per check, marked as Kubernetes does, and the word last."""
    state = known(engine_view("a"), engine_view("b", State.FAILED, reason="no\nmore [+]memory ok"))
    text = probes.healthz(state, 0.0).text(verbose=True)

    assert text == (
        "[+]loops ok\n[+]engine/a ok: ready\n"
        "[-]engine/b failed: failed: no more [+]memory ok\nfailed\n"
    )


def test_health_address_gives_no_reasons():
    """Without reasons a line says the state and nothing that could hold a path."""
    state = known(engine_view(state=State.FAILED, reason="cannot open /home/ann/model"))
    found = probes.healthz(state, 0.0, reasons=False)

    assert "/home/ann" not in found.text(verbose=True)


def test_silent_service_fails_every_probe():
    """Unreachable is never healthy: a service that does not answer fails all three."""
    state = known(engine_view())

    for probe in (probes.livez, probes.readyz, probes.healthz):
        assert not probe(state, probes.SILENT_S + 1).ok
        assert not probe(None, 0.0).ok


def test_cache_answers_while_the_service_blocks():
    """A blocked service costs a probe WAIT_S once, and the last answer is used."""
    release = threading.Event()
    service = FakeService()

    async def scenario():
        cache = probes.Cache(service)
        try:
            first, _ = await cache.look()
            service.before = lambda _: release.wait(10)
            second, silent = await asyncio.wait_for(cache.look(), 1.0)
            assert second is first
            assert 0.0 < silent < 1.0
            release.set()
            third, silent = await cache.look()
            assert third is not None
        finally:
            release.set()

    asyncio.run(scenario())


def test_cache_reports_a_service_that_raises():
    """An exception in the service is not hidden behind the last good answer."""
    service = FakeService()

    def broken(_):
        raise RuntimeError("x")

    async def scenario():
        cache = probes.Cache(service)
        await cache.look()
        service.before = broken
        found, silent = await cache.look()
        assert found is None
        assert not probes.livez(found, silent).ok

    asyncio.run(scenario())
