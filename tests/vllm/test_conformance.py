"""vLLM's engine in the suite for foreign engines."""

from typing import Any

from tba import conformance


def test_vllm_keeps_every_promise_of_an_engine(lab: Any, old: Any):
    engine = lab.engine(old)
    source = lab.root / "conformance"
    old.save_pretrained(source)
    assert [str(finding) for finding in conformance.check_engine(engine, source) if finding.error] == []
