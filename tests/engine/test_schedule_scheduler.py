"""What the scheduler does in the situations that matter, one at a time."""

from __future__ import annotations

import pytest

from stallwatch_engine.sampling.params import SamplingParams
from stallwatch_engine.schedule.errors import QueueFull, RequestRefused, RequestTooLong
from stallwatch_engine.schedule.limits import Limits
from stallwatch_engine.schedule.plan import ON_DEVICE, Feed
from stallwatch_engine.schedule.request import Finish, RequestSpec
from stallwatch_engine.schedule.testing import EOS, Engine, alone, token_after


def engine(**changes) -> Engine:
    settings = {
        "max_seqs": 4,
        "token_budget": 16,
        "max_model_len": 64,
        "page_size": 4,
        "pages": 40,
        "max_in_flight": 2,
    }
    return Engine(Limits(**{**settings, **changes}))


def spec(name="a", prompt=5, max_tokens=4, **more) -> RequestSpec:
    return RequestSpec(name, tuple(range(10, 10 + prompt)), max_tokens, **more)


def test_packed_step():
    """Two prompts share one flat step: starts, positions, lengths, and a sample for each."""
    e = engine()
    e.scheduler.add(spec("a", 3))
    e.scheduler.add(spec("b", 5))

    plan = e.step()

    assert plan.request_ids == ("a", "b")
    assert plan.query_start_loc == (0, 3, 8)
    assert plan.ids == (10, 11, 12, 10, 11, 12, 13, 14)
    assert plan.positions == (0, 1, 2, 0, 1, 2, 3, 4)
    assert plan.seq_lens == (3, 5)
    assert [s.row for s in plan.samples] == [0, 1]
    assert plan.fresh == plan.slots
    assert [(w.slot, w.index) for w in plan.page_writes] == [
        (plan.slots[0], 0),
        (plan.slots[1], 0),
        (plan.slots[1], 1),
    ]


def test_chunks():
    """A prompt over the budget comes in pieces; only the last one samples."""
    e = engine()
    e.scheduler.add(spec("a", 37))

    plans = [e.step(), e.step()]
    e.retire()
    plans.append(e.step())

    assert [plan.tokens for plan in plans] == [16, 16, 5]
    assert [len(plan.samples) for plan in plans] == [0, 0, 1]


def test_without_chunks_a_prompt_waits_until_it_fits_whole():
    """Chunking off: the prompt that does not fit beside a decode waits; nobody passes it."""
    e = engine(chunked=False, token_budget=64, max_in_flight=1)
    e.scheduler.add(spec("a", 60, 3))
    e.scheduler.add(spec("b", 20, 3))
    e.scheduler.add(spec("c", 1, 3))

    assert e.step().request_ids == ("a",)
    e.retire()
    plan = e.step()
    assert plan.request_ids == ("a", "b", "c")
    assert plan.tokens == 22


def test_a_long_prompt_does_not_starve_decodes():
    """While a long prompt is computed in chunks, every running decode gets its token in each step."""
    e = engine(token_budget=8, max_in_flight=1, pages=100)
    e.scheduler.add(spec("old", 4, 20))
    e.scheduler.add(spec("long", 40, 2))
    e.step()
    e.retire()
    seen = []
    for _ in range(5):
        plan = e.step()
        seen.append(plan.request_ids)
        assert plan.tokens <= 8
        e.retire()
    assert all("old" in ids for ids in seen)
    assert all("long" in ids for ids in seen)


def test_short_prompts_start_beside_a_long_one():
    """With a cap on chunks, requests that came after a long prompt start and decode while it is computed."""
    e = engine(token_budget=8, max_chunk=5, max_in_flight=1, pages=100, max_seqs=3)
    e.scheduler.add(spec("long", 40, 2))
    e.scheduler.add(spec("b", 2, 20))
    e.scheduler.add(spec("c", 2, 20))
    rows = []
    for _ in range(6):
        plan = e.step()
        assert plan.tokens <= 8
        rows.append(plan.request_ids)
        e.retire()
    assert rows == [("long", "b", "c")] * 6  # 5 of "long" a step: not one is left out
    e.drain()
    assert e.answers["long"] == alone(spec("long", 40, 2))


def test_no_admission_into_the_last_pages():
    """A request that would fit exactly is not started where the next page of another would preempt it."""
    e = engine(pages=9, page_size=1, max_in_flight=1)
    e.scheduler.add(spec("old", 5, 4))
    e.step()
    e.retire()
    e.scheduler.add(spec("new", 3, 2))  # "old" takes its sixth page: three are left

    assert e.step().request_ids == ("old",)
    e.drain()
    assert e.scheduler.load.preemptions == 0
    assert e.answers["new"] == alone(spec("new", 3, 2))


def test_run_ahead_refers_to_the_sample_on_the_device():
    """Step 1 is planned before step 0's id is known, and says which sample feeds it."""
    e = engine()
    e.scheduler.add(spec("a", 3))

    e.step()
    ahead = e.step()

    assert ahead.ids == (ON_DEVICE,)
    assert ahead.feeds == (Feed(index=0, step=0, sample=0),)
    assert ahead.positions == (3,)
    assert ahead.samples[0].count == 1
    assert e.scheduler.schedule() is None  # two in flight is the contract


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_end_token_seen_late(depth):
    """What was computed past the end token is discarded, and its slot and pages come back at the right step."""
    e = engine(max_in_flight=depth)
    history = list(range(10, 15))
    first = token_after(history, 0, 0)
    e.scheduler.add(spec("a", 5, 8, stop_ids=frozenset({first})))
    for _ in range(depth):
        e.step()

    (update,) = e.retire()

    assert (update.token, update.finish) == (first, Finish.STOP)
    assert e.scheduler.unfinished == 0
    held = e.scheduler.load.quarantined_pages
    assert bool(held) == (depth > 1)
    assert e.step() is None
    for _ in range(depth - 1):
        assert e.retire() == ()
    e.idle()
    assert e.scheduler.load.overrun == depth - 1


def test_length_needs_no_overrun():
    """The last token by max_tokens is known in advance: nothing is computed past it."""
    e = engine(max_in_flight=3)
    e.scheduler.add(spec("a", 5, 3))
    e.drain()
    assert e.answers["a"] == alone(spec("a", 5, 3))
    assert e.ends["a"] == [Finish.LENGTH]
    assert e.scheduler.load.overrun == 0


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_abort_at_each_depth_with_immediate_reuse(depth):
    """A request aborted with any number of steps in flight never shares a page or slot with its successor."""
    e = engine(max_in_flight=3, max_seqs=1, pages=5, max_model_len=20)
    e.scheduler.add(spec("a", 10, 8))
    for _ in range(depth):
        e.step()
    assert e.scheduler.end("a")
    successor = spec("b", 12, 8)
    e.scheduler.add(successor)
    e.drain()
    e.idle()
    assert e.answers["b"] == alone(successor)
    assert "a" not in e.answers


def test_preempted_requests_resume_with_identical_tokens():
    """Too few pages for all: the youngest begin again, and every answer is that of a run alone."""
    e = engine(pages=12, max_model_len=40)
    specs = [spec(f"r{n}", 6 + n, 24, params=SamplingParams(seed=n)) for n in range(4)]
    for each in specs:
        e.scheduler.add(each)
    e.drain()
    e.idle()
    assert e.scheduler.load.preemptions > 0
    for each in specs:
        assert e.answers[each.id] == alone(each)


def test_a_preempted_request_waits_for_its_last_sample():
    """With an id still in flight it does not begin again, although there is room: its history is not whole."""
    e = engine(pages=12, page_size=1, max_in_flight=3)
    e.scheduler.add(spec("a", 2, 9))
    e.scheduler.add(spec("brief", 6, 1))
    young = spec("young", 2, 9)
    e.scheduler.add(young)
    e.step()
    e.step()
    assert e.step() is None  # "a" needs a page; "young" was preempted for it
    assert e.scheduler.load.preemptions == 1
    e.retire()  # "brief" ends, and its pages are free

    assert e.step().request_ids == ("a",)
    e.retire()
    assert "young" in e.step().request_ids
    e.drain()
    assert e.answers["young"] == alone(young)


def test_the_oldest_is_never_preempted():
    """Pages run short with one victim to choose: it is the younger one."""
    e = engine(pages=6, max_model_len=24, max_seqs=2, max_in_flight=1)
    e.scheduler.add(spec("old", 8, 12))
    e.scheduler.add(spec("new", 8, 12))
    while not e.scheduler.load.preemptions:
        e.step()
        e.retire()
    assert [each.spec.id for each in e.scheduler._running] == ["old"]
    e.drain()
    assert e.answers["new"] == alone(spec("new", 8, 12))


def test_a_preempted_request_stands_before_those_that_never_ran():
    """Whoever was preempted comes back before everyone who arrived later."""
    e = engine(pages=6, max_model_len=24, max_seqs=2, max_in_flight=1)
    for name in ("old", "new", "later"):
        e.scheduler.add(spec(name, 8, 12))
    while not e.scheduler.load.preemptions:
        e.step()
        e.retire()
    assert [each.spec.id for each in e.scheduler._waiting] == ["new", "later"]
    e.drain()
    assert e.started == ["old", "new", "later"]


def test_failed_row_ends_that_request_alone():
    """Logits that are not finite end their request with ERROR; the others go on to their own ends."""
    e = engine()
    for name in "abc":
        e.scheduler.add(spec(name, 3, 5))
    e.step()

    updates = e.retire(frozenset({1}))

    assert [(u.request_id, u.finish) for u in updates][1] == ("b", Finish.ERROR)
    assert updates[1].token is None
    e.drain()
    e.idle()
    assert e.answers == {"a": alone(spec("a", 3, 5)), "c": alone(spec("c", 3, 5))}


def test_a_new_request_under_an_old_id_gets_none_of_its_tokens():
    """The id of an ended request may be used again at once; late results go to nobody."""
    e = engine(max_in_flight=3)
    e.scheduler.add(spec("a", 4, 8))
    e.step()
    e.step()
    e.scheduler.end("a")
    again = RequestSpec("a", (1, 2, 3), 4)
    e.scheduler.add(again)
    e.drain()
    assert e.answers["a"] == alone(again)


def test_results_cannot_be_misattributed():
    """A step out of order, twice, or with another number of ids is an error, and changes nothing."""
    e = engine()
    e.scheduler.add(spec("a", 3))
    e.step()
    e.step()
    with pytest.raises(ValueError, match="not the oldest"):
        e.scheduler.retire(1, [5])
    with pytest.raises(ValueError, match="1 samples, got 2"):
        e.scheduler.retire(0, [5, 6])
    e.retire()
    with pytest.raises(ValueError, match="not the oldest"):
        e.scheduler.retire(0, [5])
    e.drain()
    assert e.answers["a"] == alone(spec("a", 3))


def test_refusals():
    """Too long, empty, twice, or too many waiting: refused by name, and nothing is held."""
    e = engine(max_waiting=2)
    with pytest.raises(RequestTooLong, match="need 70 tokens, and 64 fit"):
        e.scheduler.add(spec("a", 60, 10))
    with pytest.raises(RequestRefused, match="needs a prompt"):
        e.scheduler.add(spec("a", 0))
    e.scheduler.add(spec("a"))
    with pytest.raises(RequestRefused, match="in use"):
        e.scheduler.add(spec("a"))
    e.scheduler.add(spec("b"))
    with pytest.raises(QueueFull, match="2 requests"):
        e.scheduler.add(spec("c"))
    e.drain()
    e.idle()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_seqs": 0}, "max_seqs"),
        ({"token_budget": 3}, "token_budget"),
        ({"chunked": False}, "longest request"),
        ({"pages": 0}, "pages"),
        ({"max_in_flight": 0}, "max_in_flight"),
        ({"max_chunk": 0}, "max_chunk"),
    ],
)
def test_limits_that_cannot_work(change, named):
    """Limits under which some request could never finish are refused when they are made."""
    with pytest.raises(ValueError, match=named):
        engine(**change)


def test_one_request_of_the_whole_capacity():
    """A request that needs every page runs alone to its end."""
    e = engine(pages=8, max_model_len=64, max_seqs=3)
    e.scheduler.add(spec("small", 4, 10))
    big = spec("big", 20, 12, stop_ids=frozenset({EOS + 1000}))
    e.scheduler.add(big)
    e.scheduler.add(spec("late", 4, 10))
    e.drain()
    e.idle()
    assert e.answers["big"] == alone(big)
    assert e.started == ["small", "big", "late"]
