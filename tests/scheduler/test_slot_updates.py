"""Updates of slots whose requests have logit rules: sent when such a request comes, and when it has gone."""

from dflash_trt.core.logit_rules import SlotUpdate
from dflash_trt.core.step_plan import StepPlan
from dflash_trt.scheduler.planner import PlannedStep
from dflash_trt.scheduler.scheduler import Scheduler
from tests.scheduler.driver import Driver, expected_tokens, make_driver, make_limits, make_request


class Recording(Scheduler):
    """Keeps the plans."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver.scheduler.limits)
        self.plans: list[StepPlan] = []
        driver.scheduler = self

    def plan(self, now: float = 0.0) -> PlannedStep:
        step = super().plan(now)
        self.plans.append(step.plan)
        return step

    def updates(self) -> list[SlotUpdate]:
        """Updates of the plans since the last call."""
        plans, self.plans = self.plans, []
        return [update for plan in plans for update in plan.slot_updates]


def test_a_request_without_rules_sends_no_update_once_its_slot_is_known() -> None:
    driver = make_driver()
    scheduler = Recording(driver)
    for name in ("a", "b", "c"):
        driver.add(make_request(name))
        driver.run()
        updates = scheduler.updates()
        if name == "a":  # the device may have served another scheduler before
            assert [(update.slot, update.rules) for update in updates] == [(0, None)]
        else:
            assert updates == []


def test_rules_come_with_all_tokens_and_are_cleared_for_the_next_request() -> None:
    driver = make_driver()
    scheduler = Recording(driver)
    driver.add(make_request("a", (5, 6), repetition_penalty=2.0))
    driver.step()
    (update,) = scheduler.updates()
    assert update.rules is not None and update.rules.repetition_penalty == 2.0
    assert (update.slot, update.token_ids.tolist(), update.rules.num_prompt_tokens) == (0, [5, 6], 2)
    driver.step()
    assert scheduler.updates() == [], "the device keeps its tokens"
    scheduler.preempt("a")
    so_far = driver.tokens["a"].copy()
    driver.step()
    (update,) = scheduler.updates()
    assert update.token_ids.tolist() == [5, 6, *so_far] and len(so_far) > 0
    assert update.rules is not None and update.rules.num_prompt_tokens == 2
    driver.run()
    driver.add(make_request("b"))
    driver.run()
    (update,) = scheduler.updates()
    assert (update.slot, update.rules) == (0, None)


def test_updates_of_abandoned_steps_come_with_the_next_one_in_their_order() -> None:
    driver = make_driver(make_limits(max_batch_size=2))
    scheduler = Recording(driver)
    requests = [
        make_request(name, (1, 2, 3, tail), repetition_penalty=2.0 + tail) for name, tail in (("a", 4), ("b", 5))
    ]
    driver.add(requests[0])
    scheduler.plan()
    scheduler.end("a", "cancelled")
    driver.add(requests[1])
    scheduler.plan()
    scheduler.abandon()
    scheduler.abandon()
    scheduler.updates()
    driver.step()
    first, second = scheduler.updates()
    assert (first.slot, second.slot) == (0, 0), "one slot, two requests: the later one wins"
    driver.run()
    assert driver.tokens["b"] == expected_tokens(driver.executor, requests[1])
