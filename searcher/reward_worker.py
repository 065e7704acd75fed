"""One reward worker: `python -m tba.searcher.reward_worker FD`, started by the pool in `rewards.py`.

msgpack objects over a socket, no pickle. In: the settings, then batches of items. Out: `ready`, or a sentence if the
task does not load; then one answer per item as soon as it is known, in order, so that a worker that dies is known to
have died of the first item without an answer. Imports neither torch nor vllm, unless the task does.
"""

import os
import resource
import socket
import sys
from collections.abc import Iterator
from typing import Any

import msgpack

from tba.common.config import TaskSection
from tba.common.errors import TaskError
from tba.common.process import die_with_parent
from tba.searcher.tasks import load_task
from tba.searcher.tasks.scoring import score, storable
from tba.searcher.tasks.task import Prompt

_CHUNK_BYTES = 1 << 16


def main() -> None:
    """Serve until the pool closes the socket."""
    die_with_parent()
    own_pid = os.getpid()
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)  # a program that a reward starts must not answer
    messages = _messages(channel)
    settings = next(messages)
    _limit(settings["memory_mib"])
    try:
        task = load_task(TaskSection.model_validate(settings["task"]))
    except TaskError as trouble:
        channel.sendall(msgpack.packb(f"in a reward worker: {storable(str(trouble))}"))
        sys.exit(1)
    channel.sendall(msgpack.packb("ready"))
    for batch in messages:
        for key, text, answer, response, finished in batch:
            reward, error = score(task, Prompt(key, text, answer), response, finished, settings["memory_mib"])
            if os.getpid() != own_pid:  # the reward forked, and this is the child: it must not answer too
                os._exit(0)
            channel.sendall(msgpack.packb([reward.total, reward.parts, error]))


def _messages(channel: socket.socket) -> Iterator[Any]:
    unpacker = msgpack.Unpacker(max_buffer_size=1 << 30)
    while chunk := channel.recv(_CHUNK_BYTES):
        unpacker.feed(chunk)
        yield from unpacker


def _limit(memory_mib: int) -> None:
    """Private memory only: the address space of a healthy process can be many times what it uses."""
    resource.setrlimit(resource.RLIMIT_DATA, (memory_mib << 20, memory_mib << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        with open("/proc/self/oom_score_adj", "w") as file:  # of all processes, this one is to go first
            file.write("1000")


if __name__ == "__main__":
    main()
