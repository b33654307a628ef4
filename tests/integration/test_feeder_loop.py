"""The feeder on a real event loop (which needs a socket pair, so it is no unit test): how each submission ends."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import pytest
from feeding import make_claim, make_job, waiting

from service.core.model import Outcome, Priority
from service.core.usage import Usage
from service.store.cohorts import Claim
from workers.engines.base import EngineFacts, EngineGone, EngineReply, EngineRequest, EngineTimeout
from workers.feeder import Aborted, Admission, Crashed, Disconnected, Ended, Feeder, TimedOut, Unfed, Waiting


class FakeEngine:
    """Answers when told to; `requests` in the order of submission."""

    kind = "fake"

    def __init__(self) -> None:
        self.requests: list[EngineRequest] = []
        self.answers: list[asyncio.Future[EngineReply]] = []
        self.cancelled: list[int] = []
        self.is_well = True
        self.asked = 0
        self.can_say = asyncio.Event()
        self.can_say.set()

    async def start(self) -> EngineFacts:
        raise NotImplementedError

    async def submit(self, request: EngineRequest) -> EngineReply:
        self.requests.append(request)
        answer: asyncio.Future[EngineReply] = asyncio.get_running_loop().create_future()
        self.answers.append(answer)
        try:
            return await answer
        except asyncio.CancelledError:
            self.cancelled.append(request.job_id)
            raise

    async def tokenize(self, endpoint: str, body: bytes) -> list[int] | None:
        return None

    async def is_alive(self) -> bool:
        self.asked += 1
        await self.can_say.wait()
        return self.is_well

    async def wait_dead(self) -> str:
        return "never"

    async def stop(self, grace_seconds: float) -> None:
        return


REPLY = EngineReply(status_code=200, body=b"{}", usage=Usage())
BROKEN = EngineReply(status_code=500, body=b"{}", usage=Usage())


TABLES: list[Table] = []


@pytest.fixture(autouse=True)
async def cleared() -> AsyncIterator[None]:
    """What a test leaves in flight is taken back, so that no task outlives its loop."""
    yield
    while TABLES:
        TABLES.pop().feeder.take_back()
        await turns()


class Table:
    """A feeder over a fake engine, and what ended."""

    def __init__(self, max_num_seqs: int = 16) -> None:
        TABLES.append(self)
        self.engine = FakeEngine()
        admission = Admission(max_num_seqs=max_num_seqs, kv_capacity_tokens=None)
        self.feeder = Feeder(engine=self.engine, admission=admission, timeout_seconds=9)
        self.ended: list[Ended] = []
        self.news: asyncio.Queue[Ended] = asyncio.Queue()
        self.items: dict[int, Waiting] = {}

    def item(self, job_id: int, claim: Claim | None = None, position: int = 0) -> Waiting:
        self.items[job_id] = waiting(claim or make_claim(), make_job(job_id), position, self.sink)
        return self.items[job_id]

    def sink(self, ended: Ended) -> None:
        self.ended.append(ended)
        self.news.put_nowait(ended)

    def endings(self) -> dict[int, object]:
        return {ended.job.job_id: ended.ending for ended in self.ended}


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_priority_numbers_fall_by_class_and_rise_by_order() -> None:
    table = Table()
    chat = make_claim(2, priority=Priority.INTERACTIVE)
    table.feeder.add([table.item(1), table.item(2, position=1)])
    table.feeder.add([table.item(3, chat)])
    await turns()
    first, second, interactive = (request.priority for request in table.engine.requests)
    assert interactive < first < second


async def test_an_end_makes_room_for_the_next() -> None:
    table = Table(max_num_seqs=1)
    table.feeder.add([table.item(number, position=number) for number in range(5)])
    await turns()
    assert [request.job_id for request in table.engine.requests] == [0, 1, 2]
    table.engine.answers[0].set_result(REPLY)
    await turns()
    assert table.endings() == {0: REPLY}
    assert [request.job_id for request in table.engine.requests] == [0, 1, 2, 3]


async def test_abort_ends_waiting_and_flying_jobs_and_spares_the_rest() -> None:
    table = Table(max_num_seqs=1)
    table.feeder.add([table.item(number, position=number) for number in range(5)])
    await turns()
    table.feeder.abort({0: Outcome.CANCELLED, 4: Outcome.EXPIRED})
    await turns()
    assert table.endings() == {4: Aborted(outcome=Outcome.EXPIRED), 0: Aborted(outcome=Outcome.CANCELLED)}
    assert table.engine.cancelled == [0]
    assert [request.job_id for request in table.engine.requests] == [0, 1, 2, 3]


async def test_a_task_that_is_cancelled_before_its_first_step_leaves_its_place() -> None:
    table = Table(max_num_seqs=1)
    table.feeder.add([table.item(1)])
    table.feeder.abort({1: Outcome.CANCELLED})
    await turns()
    assert table.endings() == {1: Aborted(outcome=Outcome.CANCELLED)}
    assert table.feeder.running == 0


async def test_a_dropped_cohort_says_nothing_and_may_come_again() -> None:
    table = Table()
    claim = make_claim(7)
    table.feeder.add([table.item(1, claim), table.item(2, make_claim(8))])
    await turns()
    table.feeder.drop(claim)
    table.feeder.add([table.item(1, make_claim(7))])  # claimed again before the first was aborted
    await turns()
    assert table.ended == []
    assert table.feeder.running == 2
    table.engine.answers[2].set_result(REPLY)
    await turns()
    assert table.endings() == {1: REPLY}


async def test_a_dead_engine_crashes_what_flew_and_hands_back_the_rest() -> None:
    table = Table(max_num_seqs=1)
    table.feeder.add([table.item(number, position=number) for number in range(5)])
    await turns()
    table.engine.is_well = False
    table.engine.answers[0].set_exception(EngineGone())  # its connection broke a moment before the death was known
    await turns()
    table.feeder.die()
    await turns()
    kinds = {job_id: type(ending) for job_id, ending in table.endings().items()}
    assert kinds == {0: Crashed, 1: Crashed, 2: Crashed, 3: Unfed, 4: Unfed}
    table.feeder.add([table.item(9)])
    assert isinstance(table.endings()[9], Unfed)


async def test_a_drain_lets_fly_what_flies_until_it_is_taken_back() -> None:
    table = Table(max_num_seqs=1)
    table.feeder.add([table.item(number, position=number) for number in range(4)])
    await turns()
    table.feeder.close()
    assert isinstance(table.endings()[3], Unfed)
    table.engine.answers[0].set_result(REPLY)
    await turns()
    assert table.endings()[0] == REPLY
    table.feeder.take_back()
    await turns()
    assert {job_id for job_id, ending in table.endings().items() if isinstance(ending, Unfed)} == {1, 2, 3}


async def test_while_paused_nothing_is_fed() -> None:
    table = Table()
    table.feeder.pause(True)
    table.feeder.add([table.item(1)])
    await turns()
    assert (table.engine.requests, table.feeder.waiting) == ([], 1)
    table.feeder.pause(False)
    await turns()
    assert table.feeder.running == 1


async def test_a_retry_waits_and_can_be_aborted_meanwhile() -> None:
    table = Table()
    table.feeder.add_later(table.item(1), 0)
    table.feeder.add_later(table.item(2), 1000)
    table.feeder.abort({2: Outcome.CANCELLED})
    assert table.endings() == {2: Aborted(outcome=Outcome.CANCELLED)}
    await asyncio.sleep(0.001)  # one turn of the loop's timers
    await turns()
    assert [request.job_id for request in table.engine.requests] == [1]


async def test_a_slow_engine_is_a_timeout_and_a_broken_body_no_silence(caplog: pytest.LogCaptureFixture) -> None:
    table = Table()
    table.feeder.add([table.item(1), table.item(2)])
    await turns()
    table.engine.answers[0].set_exception(EngineTimeout())
    table.engine.answers[1].set_exception(ValueError("broken"))
    await turns()
    assert isinstance(table.endings()[1], TimedOut)
    assert 2 in table.endings()
    assert "a submission failed: job=2" in caplog.text


async def test_a_dying_engine_that_answers_500_crashes_what_flew_and_is_fed_nothing_more() -> None:
    table = Table(max_num_seqs=1)
    table.feeder.add([table.item(number, position=number) for number in range(5)])
    await turns()
    table.engine.is_well = False
    for answer in table.engine.answers:
        answer.set_result(BROKEN)
    await turns()
    assert table.ended == []
    assert [request.job_id for request in table.engine.requests] == [0, 1, 2]
    table.feeder.die()
    await turns()
    kinds = {job_id: type(ending) for job_id, ending in table.endings().items()}
    assert kinds == {0: Crashed, 1: Crashed, 2: Crashed, 3: Unfed, 4: Unfed}


async def test_while_an_engine_is_asked_whether_it_lives_nothing_is_fed() -> None:
    table = Table(max_num_seqs=1)
    table.feeder.add([table.item(number, position=number) for number in range(5)])
    await turns()
    table.engine.can_say.clear()
    table.engine.answers[0].set_result(BROKEN)
    table.engine.answers[1].set_result(BROKEN)
    table.engine.answers[2].set_result(REPLY)
    await turns()
    assert table.endings() == {2: REPLY}
    assert len(table.engine.requests) == 3
    table.engine.can_say.set()
    await turns(10)
    assert table.endings() == {2: REPLY, 0: BROKEN, 1: BROKEN}
    assert table.engine.asked == 1  # one question for all
    assert [request.job_id for request in table.engine.requests] == [0, 1, 2, 3, 4]


async def test_an_engine_that_is_not_well_and_does_not_die_is_taken_at_its_word() -> None:
    table = Table()
    table.feeder.death_seconds = 0.01
    table.engine.is_well = False
    table.feeder.add([table.item(1), table.item(2, position=1)])
    await turns()
    table.engine.answers[0].set_result(BROKEN)
    table.engine.answers[1].set_exception(EngineGone())
    for _ in range(2):
        await asyncio.wait_for(table.news.get(), 5)
    assert table.endings()[1] == BROKEN
    assert isinstance(table.endings()[2], Disconnected)


async def test_a_retry_of_a_500_crashes_with_its_engine() -> None:
    table = Table()
    table.feeder.add_later(table.item(1), 1000, is_suspect=True)
    table.feeder.add_later(table.item(2), 1000, is_suspect=False)
    table.feeder.pause(True)
    table.feeder.add_later(table.item(3), 0, is_suspect=True)
    await asyncio.sleep(0.001)  # it is due, and waits to be fed
    table.feeder.die()
    table.feeder.add_later(table.item(4), 1, is_suspect=True)  # judged before the death, handed in after it
    table.feeder.add_later(table.item(5), 1, is_suspect=False)
    kinds = {job_id: type(ending) for job_id, ending in table.endings().items()}
    assert kinds == {1: Crashed, 2: Unfed, 3: Crashed, 4: Crashed, 5: Unfed}


async def test_a_job_that_was_fed_again_is_no_suspect_of_its_last_try() -> None:
    table = Table(max_num_seqs=1)
    table.feeder.add_later(table.item(1), 0, is_suspect=True)
    await asyncio.sleep(0.001)
    await turns()
    table.engine.answers[0].set_result(REPLY)
    await turns()
    table.feeder.add_later(table.items[1], 1000, is_suspect=False)
    table.feeder.die()
    assert [type(ended.ending) for ended in table.ended] == [EngineReply, Unfed]


async def test_only_the_claim_that_was_lost_is_dropped() -> None:
    table = Table()
    newer = dataclasses.replace(make_claim(7), attempt=2)
    table.feeder.add([table.item(1, newer)])
    await turns()
    table.feeder.drop(make_claim(7))
    await turns()
    assert table.engine.cancelled == []
