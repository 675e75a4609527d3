"""Which requests take part in a commit beyond gaining a token, and that all others pay nothing for them."""

from __future__ import annotations

from typing import Any

import pytest
from simulation.rig import Rig, capacity

from headrace.engine.scheduling.asked import Asked, Sampling
from headrace.engine.scheduling.options.at_commit import at_commit_of
from headrace.engine.scheduling.options.forks import branch, goes_on
from headrace.engine.scheduling.pooling import Pooling
from headrace.engine.scheduling.request import Request
from headrace.engine.scheduling.result import NoToken, StepResult
from headrace.engine.scheduling.scheduler import Scheduler
from headrace.engine.scheduling.shaping import Report, Reporting, Shaping

REPORT = Report(-0.5, 1, ())
GRAMMAR: Any = object()
PROMPT = list(range(1, 11))


def scheduler_of(**options: Any) -> Scheduler:
    return Scheduler(capacity(**options), secret=b"test")


def commit_prompts(scheduler: Scheduler) -> None:
    """Let every waiting prompt be computed and gain token 7."""
    plan = scheduler.plan()
    assert plan is not None
    scheduler.commit(plan, StepResult([7] * plan.size))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sampling": Sampling(temperature=1.0, top_k=5), "stop_ids": frozenset({3}), "priority": 2, "tenant": "a"},
        {"shaping": Shaping(bias=((1, 2.0),)), "deadline": 5.0, "root": b"x", "alone": True},
    ],
)
def test_a_plain_request_takes_no_part_in_a_commit(options: dict[str, Any]) -> None:
    assert at_commit_of(Asked(limit=9, **options)) is None


@pytest.mark.parametrize(
    ("options", "every_step"),
    [
        ({"reporting": Reporting(completion=2)}, True),
        ({"pooling": Pooling("last")}, True),
        ({"processor": lambda tokens, logits: logits}, True),
        ({"grammar": GRAMMAR, "jumps": True}, True),
        ({"holds": True}, True),
        ({"grammar": GRAMMAR}, False),
    ],
)
def test_an_option_that_needs_something_at_a_commit_has_it(options: dict[str, Any], every_step: bool) -> None:
    """A grammar alone needs it only where a mask was late: its other steps are those of a plain request."""
    at_commit = at_commit_of(Asked(limit=9, **options))
    assert at_commit is not None and at_commit.every_step is every_step


def test_a_request_with_reports_leaves_the_others_of_its_step_alone() -> None:
    scheduler = scheduler_of()
    plain = [Request(Asked(limit=90), [name, *PROMPT]) for name in range(3)]
    asks = Request(Asked(limit=90, reporting=Reporting(completion=1)), [5, *PROMPT])
    for request in (*plain, asks):
        scheduler.submit(request)
    commit_prompts(scheduler)
    plan = scheduler.plan()
    assert plan is not None
    index = [work.request for work in plan.works].index(asks)
    done = scheduler.commit(plan, StepResult([8] * 4, reports={index: REPORT}))
    assert list(done.requests) == plain and list(done.tokens) == [8, 8, 8]
    assert [(each.request, each.token, each.report) for each in done.others] == [(asks, 8, REPORT)]


@pytest.mark.parametrize("what", [NoToken.NON_FINITE, NoToken.NOTHING_LEFT])
def test_what_happened_instead_counts_whatever_the_id_is(what: NoToken) -> None:
    """The id of such a row is arbitrary: here it would be a token like any other, in the loop that looks at least."""
    scheduler = scheduler_of()
    requests = [Request(Asked(limit=90), [name, *PROMPT]) for name in range(3)]
    for request in requests:
        scheduler.submit(request)
    commit_prompts(scheduler)
    commit = scheduler.plan()
    assert commit is not None
    scheduler.commit(commit, StepResult([8] * 3))
    plan = scheduler.plan()
    assert plan is not None and all(request.plain_until > request.computed for request in requests)
    done = scheduler.commit(plan, StepResult([9] * 3, instead={1: what}))
    assert list(done.requests) == [requests[0], requests[2]]
    (failed,) = done.others
    assert failed.request is requests[1] and failed.error is not None and requests[1].tokens[-1] == 8


def test_a_step_has_one_token_for_each_work_item() -> None:
    scheduler = scheduler_of()
    scheduler.submit(Request(Asked(limit=90), PROMPT))
    plan = scheduler.plan()
    assert plan is not None
    for result in (StepResult([7, 8]), StepResult([7], counts=[1])):
        with pytest.raises(ValueError, match="tokens for 1 works"):
            scheduler.commit(plan, result)


def test_reports_on_a_prompt_survive_a_late_mask() -> None:
    scheduler = scheduler_of()
    asked = Asked(limit=90, reporting=Reporting(prompt=1), grammar=GRAMMAR)
    late, other = Request(asked, PROMPT), Request(Asked(limit=90), PROMPT[::-1])
    scheduler.submit(late)
    scheduler.submit(other)
    plan = scheduler.plan()
    assert plan is not None
    reports = {plan.works.index(work): [REPORT] * 9 for work in plan.works if work.request is late}
    index = next(iter(reports))
    scheduler.commit(plan, StepResult([7, 7], instead={index: NoToken.LATE}, prompt_reports=reports))
    assert late.prompt_reports == [REPORT] * 9 and late.is_held and late.planned == len(PROMPT) - 1


def test_what_was_asked_is_shared_by_what_goes_on_and_progress_is_not() -> None:
    rig = Rig(capacity(), depth=1)
    (held,) = rig.submit(PROMPT, 1, holds=True, tenant="a", priority=3, deadline=50.0)
    rig.run()
    following = goes_on(held, 5)
    assert following.tokens == [*held.tokens[:-1], 5] and following.order == (3, held.id, -1)
    assert (following.asked.tenant, following.asked.holds) == ("a", True)
    assert (following.limit, following.computed, following.place.pages) == (len(held.tokens) + 1, 0, [])
    other = branch(held, 4, seed=9)
    assert (other.tokens, other.prompt_len) == (PROMPT[:4], len(PROMPT))
    assert other.asked.deadline == following.asked.deadline == held.asked.deadline == 50.0
    assert other.asked.sampling.seed == 9 and other.asked.tenant == "a" and other.place is not held.place
