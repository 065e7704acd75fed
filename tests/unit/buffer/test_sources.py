"""Which nodes a node asks for snapshots before the trainer."""

from tba.common.wire import messages


def sources(buffer, node: int, start: int = 0) -> list[int]:
    """Send a heartbeat of a searcher of a node, and return the nodes in its reply."""
    beat = messages.Heartbeat(
        activity="waiting", reason="", weights_version=None, metrics={}, serves=f"tcp://n{node}:5759"
    )
    reply = buffer.ask(beat, sender=f"node{node}.{start}").message
    return [int(address.removeprefix("tcp://n").removesuffix(":5759")) for address in reply.addresses]


def test_sixteen_nodes_form_a_tree_in_which_none_serves_more_than_two(harness):
    buffer = harness()
    for node in range(16):
        sources(buffer, node)
    found = {node: sources(buffer, node) for node in range(16)}
    assert found[0] == []
    assert found[1] == found[2] == [0]
    assert found[15] == [7, 3, 1, 0]
    assert all(source < node for node, before in found.items() for source in before)
    first = [before[0] for before in found.values() if before]
    assert max(first.count(node) for node in range(16)) == 2


def test_a_list_of_sources_is_short_however_many_nodes_there_are(harness):
    buffer = harness()
    for node in range(100):
        sources(buffer, node)
    assert sources(buffer, 99) == [49, 24, 11, 5]


def test_the_searchers_of_a_node_are_one_source_and_one_that_left_or_is_silent_is_none(harness):
    buffer = harness(buffer={"lease_seconds": 30})
    sources(buffer, 0, start=1)
    assert sources(buffer, 0, start=2) == []
    assert sources(buffer, 1) == sources(buffer, 2) == [0]
    buffer.ask(messages.Goodbye(), sender="node0.1")
    assert sources(buffer, 1) == [0]
    buffer.ask(messages.Goodbye(), sender="node0.2")
    assert sources(buffer, 1) == []
    assert sources(buffer, 2) == [1]
    buffer.clock.advance(31)
    assert sources(buffer, 2) == []


def test_a_searcher_whose_node_serves_nothing_gets_no_sources(harness):
    buffer = harness()
    sources(buffer, 0)
    beat = messages.Heartbeat(activity="waiting", reason="", weights_version=None, metrics={})
    assert isinstance(buffer.ask(beat, sender="plain.1").message, messages.Done)
