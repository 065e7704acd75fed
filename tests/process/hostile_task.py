"""A task whose reward does what the response says. Loaded by the workers through `task.name`."""

import os
import subprocess
import time

from tba.searcher.tasks.task import Prompt, Reward


class HostileTask:
    """Scores 1, unless the response names a misdeed."""

    name = "hostile"

    def prompts(self):
        return [Prompt("p", "question", "answer")]

    def held_out(self):
        return []

    def score(self, prompt, response, finished):
        misdeed = getattr(self, f"_{response}", None)
        if misdeed:
            return misdeed()
        return Reward(1.0, {"correct": 1.0})

    def _raises(self):
        raise ValueError("lone \ud800 surrogate")

    def _interrupts(self):
        raise KeyboardInterrupt

    def _hangs(self):
        time.sleep(3600)

    def _exits(self):
        os._exit(3)

    def _segfaults(self):
        os.kill(os.getpid(), 11)

    def _eats(self):
        hoard = []
        while True:
            hoard.append(bytearray(1 << 20))

    def _prints(self):
        print("noise", flush=True)
        subprocess.run(["echo", "more noise"], check=True)
        return Reward(1.0, {})

    def _forks(self):
        os.fork()
        return Reward(1.0, {})

    def _infinite(self):
        return Reward(float("inf"), {})

    def _nothing(self):
        return None
