"""One reward worker: `python -m tba.searcher.reward_worker FD`, started by the pool in `task_rewards.py`.

In: the settings, then batches of items. Out: `ready`, or a sentence if the task does not load; then one answer per item
as soon as it is known, in order, so that a worker that dies is known to have died of the first item without an answer.
Imports neither torch nor vllm, unless the task does.
"""

import os
import resource
import sys
from typing import Any

from tba.common.config import TaskSection
from tba.common.errors import TaskError
from tba.searcher.tasks import load_task
from tba.searcher.tasks.scoring import score, storable
from tba.searcher.tasks.task import Prompt, Task
from tba.searcher.worker_process import Connection


def main() -> None:
    """Serve until the pool closes the socket."""
    own_pid = os.getpid()
    connection = Connection()
    settings = next(iter(connection))
    # Private memory only: the address space of a healthy process can be many times what it uses.
    memory_mib = settings["memory_mib"]
    resource.setrlimit(resource.RLIMIT_DATA, (memory_mib << 20, memory_mib << 20))
    try:
        task = _load(settings["task"], memory_mib)
    except TaskError as trouble:
        connection.send(f"in a reward worker: {storable(str(trouble))}")
        sys.exit(1)
    connection.send("ready")
    for batch in connection:
        for key, text, answer, response, finished in batch:
            reward, error = score(task, Prompt(key, text, answer), response, finished, memory_mib)
            if os.getpid() != own_pid:  # the reward forked, and this is the child: it must not answer too
                os._exit(0)
            connection.send([reward.total, reward.parts, error])


def _load(settings: dict[str, Any], memory_mib: int) -> Task:
    """The task. Raises TaskError, also where the limit leaves too little memory: another start has no more."""
    try:
        return load_task(TaskSection.model_validate(settings))
    except MemoryError:
        pass  # what the task had taken is free again after this, for the sentence
    raise TaskError(
        f"task {settings['name']} does not load in task.reward_memory_mib = {memory_mib}: out of memory; raise it"
    )


if __name__ == "__main__":
    main()
