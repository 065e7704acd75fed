"""A worker that scores with the task: `python -m tba.searcher.scoring.task_worker FD`, started by `task_scorer.py`.

Its messages are those of `worker_pool.py`. Each result is sent as soon as it is known, in order, so that a worker that
dies is known to have died of its first item without a result. It imports neither torch nor vllm unless the task does.
"""

import os
import resource
import sys
from typing import Any

from tba.common.config import TaskSection
from tba.common.errors import TaskError
from tba.searcher.scoring.scoring import score, storable
from tba.searcher.scoring.worker_process import Connection
from tba.searcher.tasks import load_task
from tba.searcher.tasks.task import Prompt, Task


def main() -> None:
    """Serve until the searcher closes the socket."""
    own_pid = os.getpid()
    connection = Connection()
    settings = next(connection.messages)
    # Private memory only: a healthy process can have an address space many times larger than what it uses.
    memory_mib = settings["memory_mib"]
    resource.setrlimit(resource.RLIMIT_DATA, (memory_mib << 20, memory_mib << 20))
    try:
        task = _load(settings["task"], memory_mib)
    except TaskError as refusal:
        connection.send(["refused", f"in a reward worker: {storable(str(refusal))}"])
        sys.exit(1)
    connection.send(["ready"])
    for batch in connection.messages:
        for ticket, prompt, response, finished in batch:
            reward, error = score(task, Prompt(*prompt), response, finished, memory_mib)
            # If the reward forked, this may be the child, which must not reply as well.
            if os.getpid() != own_pid:
                os._exit(0)
            connection.send(["results", [[ticket, [reward.total, reward.parts, error], None]]])


def _load(settings: dict[str, Any], memory_mib: int) -> Task:
    """Load the task. Raises TaskError, also if the limit leaves too little memory: another start has no more."""
    try:
        return load_task(TaskSection.model_validate(settings))
    except MemoryError:
        # The sentence is formatted after this block, when the memory that the task had allocated is free again.
        pass
    raise TaskError(
        f"task {settings['name']} does not load in task.reward_memory_mib = {memory_mib}: out of memory; raise it"
    )


if __name__ == "__main__":
    main()
