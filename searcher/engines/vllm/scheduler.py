"""The scheduler of a started vLLM: batches computed ahead, the size of the KV cache, preemptions.

With asynchronous scheduling, vLLM starts a batch before it has processed the one before:

    step n      schedule and start batch n + 1, then wait for batch n and hand out its tokens
    drain       schedule nothing, wait for each batch that was started

This file reads vLLM's `EngineCore`, which runs in this process.
"""

from collections.abc import Callable
from typing import Any

from tba.common.clock import Clock, SystemClock
from tba.common.config.search import SearchSection
from tba.common.log import get_logger
from tba.searcher.engines.vllm.start import most_in_flight

log = get_logger(__name__)

_REPORT_SECONDS = 60.0
# From this fraction of the responses in flight, preempted in a minute, a lower limit is advised.
_FREQUENT = 0.1


class VllmScheduler:
    """The scheduler of an `LLMEngine` whose core runs in this process."""

    def __init__(self, llm: Any) -> None:
        self._core = llm.engine_core.engine_core
        self._clock: Clock = SystemClock()
        self.preemptions = 0
        self._reported = 0
        # The end of the minute of the preemptions that are not reported yet.
        self._report_at: float | None = None
        self._count_preemptions()

    @property
    def kv_cache_tokens(self) -> int:
        """The tokens that fit the KV cache; 0 for a model without one."""
        return int(self._core.vllm_config.cache_config.kv_cache_size_tokens or 0)

    @property
    def kv_cache_gib(self) -> float:
        """The size of the KV cache on each GPU in GiB, 0 for a model without one.

        As `search.kv_cache_gib` it gives the same cache again.
        """
        cache = self._core.scheduler.kv_cache_config
        return float(sum(tensor.size for tensor in cache.kv_cache_tensors) / 2**30)

    def choose_in_flight(self, search: SearchSection, prompt_tokens: int) -> int:
        """Return the limit of responses in flight, and log it with the size of the KV cache.

        `auto` counts each with its prompt and half of its budget: responses in flight are of all ages.
        """
        most = most_in_flight(search)
        context = int(self._core.vllm_config.model_config.max_model_len)
        each = min(prompt_tokens + -(-search.max_tokens // 2), context)
        automatic = search.max_in_flight == "auto" and self.kv_cache_tokens > 0
        chosen = min(max(self.kv_cache_tokens // each, 1), most) if automatic else most
        size = round(self.kv_cache_gib, 2)
        log.info("KV cache", gib=size, tokens=self.kv_cache_tokens, max_in_flight=chosen, tokens_each=each)
        if automatic and chosen < search.samples_per_prompt:
            advice = "raise search.gpu_memory_utilization, or search.kv_cache_gib if it is set; another process that "
            advice += "allocates on the GPU while vLLM starts makes the cache smaller"
            log.warning("the KV cache holds less than one visit", visit=search.samples_per_prompt, advice=advice)
        return chosen

    def drain(self, step: Callable[[], object]) -> None:
        """Call `step` until every batch that was started is processed. Does nothing without asynchronous scheduling.

        Tokens get the version that is set when they are processed. So this must come before a change of the weights,
        or of their version.
        """
        if not self._core.batch_queue:
            return
        from vllm.v1.core.sched.interface import PauseState

        self._core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        try:
            while self._core.batch_queue:
                step()
        finally:
            self._core.scheduler.set_pause_state(PauseState.UNPAUSED)

    def report(self, in_flight: int) -> None:
        """Log the preemptions of each minute in which there were any."""
        if self.preemptions == self._reported:
            return
        now = self._clock.monotonic()
        self._report_at = self._report_at or now + _REPORT_SECONDS
        if now < self._report_at:
            return
        count, self._reported, self._report_at = self.preemptions - self._reported, self.preemptions, None
        advice = "lower search.max_in_flight" if count > _FREQUENT * in_flight else "rare enough to ignore"
        log.warning("responses preempted: the KV cache is full", preemptions=count, in_flight=in_flight, advice=advice)

    def _count_preemptions(self) -> None:
        """Count calls of the scheduler's own method. vLLM's statistics count them too, at a cost per token."""
        scheduler = self._core.scheduler
        preempt = scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.preemptions += 1
            return preempt(*args, **kwargs)

        scheduler._preempt_request = counted
