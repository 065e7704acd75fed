"""A task whose reward misbehaves as the response names. Workers load it through `task.name`."""

import asyncio
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tba.searcher.tasks.task import Prompt, Reward


def first(misdeed: str) -> bool:
    """Whether this is the first call for a misdeed, in any process. A file in HOSTILE_FOLDER records it."""
    try:
        Path(os.environ["HOSTILE_FOLDER"], misdeed).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


MISDEEDS: dict[str, Callable[[], Any]] = {
    "hangs": lambda: time.sleep(3600),
    "exits": lambda: os._exit(3),
    "segfaults": lambda: os.kill(os.getpid(), 11),
    "infinite": lambda: Reward(float("inf"), {}),
    "nan": lambda: Reward(float("nan"), {}),
    "huge": lambda: Reward(float("1e10"), {}),
    "nothing": lambda: None,
    "text": lambda: Reward("1.0", {}),  # type: ignore[arg-type]
}


class HostileTask:
    """Scores 1, unless the response names a misdeed: one of those above, or a method below."""

    name = "hostile"

    def prompts(self):
        return [Prompt("p", "question", "answer")]

    def held_out(self):
        return []

    def score(self, prompt, response, finished):
        misdeed = getattr(self, f"_{response}", None) or MISDEEDS.get(response)
        if misdeed:
            return misdeed()
        return Reward(1.0, {"correct": 1.0})

    def _raises(self):
        raise ValueError("lone \ud800 surrogate")

    def _interrupts(self):
        raise KeyboardInterrupt

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

    def _writes(self):
        # MessagePack of "results" for a number that no item has.
        garbage = b"\x92\xa7results\x91\x93\xcd\x27\x0f\xc0\xc0"
        for descriptor in range(3, 256):
            try:
                if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    os.write(descriptor, garbage)
            except OSError:
                continue
        time.sleep(3600)


class Judge(HostileTask):
    """Scores in a coroutine, several responses at a time."""

    def __init__(self):
        self.under_way = self.most = 0

    async def score(self, prompt, response, finished):
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            # A reply that comes when as many others are awaited as the worker may have.
            while response == "together" and self.most < 3:
                await asyncio.sleep(0.01)
            if response == "late":
                await asyncio.sleep(3600)
            return super().score(prompt, response, finished)
        finally:
            self.under_way -= 1

    def _most(self):
        return Reward(float(self.most), {})


class HostilePrompts(HostileTask):
    """Prompts named after misdeeds: the first scored response of each prompt commits it."""

    def prompts(self):
        keys = ("raises", "hangs", "exits", "eats", "prints", "starts", "nothing", "text", "nan")
        return [Prompt(key, f"{n}+1=", "") for n, key in enumerate(keys)]

    def score(self, prompt, response, finished):
        if first(prompt.key):
            return super().score(prompt, prompt.key, finished)
        return Reward(1.0, {name: float(name in sys.modules) for name in ("torch", "vllm", "transformers")})

    def _starts(self):
        """Start a program that outlives its parent and its parent's process group."""
        child = subprocess.Popen(["sleep", "3600"], process_group=0)
        Path(os.environ["HOSTILE_FOLDER"], "pids").write_text(f"{os.getpid()} {child.pid}")
        return Reward(1.0, {})


class Starter(HostilePrompts):
    """Only the misdeed that starts a program; its worker survives."""

    def prompts(self):
        return [Prompt("starts", "1+1=", "")]


class Hungry(HostileTask):
    """Needs 512 MiB to load."""

    def __init__(self):
        self._hoard = bytearray(512 << 20)


class HeldBack(HostileTask):
    """Loads in the searcher, but not in a worker."""

    def __init__(self):
        if "task_scorer" in sys.argv[0]:
            raise OSError("no licence server")


class SlowOnce(HostileTask):
    """The first worker that loads it hangs."""

    def __init__(self):
        if "task_scorer" in sys.argv[0] and first("slow"):
            time.sleep(3600)


class Unsteady(HostileTask):
    """The first worker that loads it is killed, as the kernel does when memory is short."""

    def __init__(self):
        if "task_scorer" in sys.argv[0] and first("killed"):
            os.kill(os.getpid(), 9)
