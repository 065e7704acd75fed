"""An environment that misbehaves as a prompt's key names: `METHOD MISDEED`. Workers load it through `task.name`."""

import asyncio
import contextlib
import os
import subprocess
import time

from tba.searcher.tasks.task import Prompt, Turn

hoard: list[bytearray] = []


def misbehave(misdeed: str) -> object:
    """Do it, and return what a method with this misdeed returns, if it does."""
    match misdeed:
        case "hangs":
            time.sleep(3600)
        case "late":
            time.sleep(5.5)
        case "raises":
            raise ValueError("no such move")
        case "exits":
            os._exit(3)
        case "leaves":
            raise SystemExit(4)
        case "kills":
            os.kill(os.getpid(), 9)
        case "eats":
            with contextlib.suppress(MemoryError):
                while True:
                    hoard.append(bytearray(1 << 20))
            # Not even a small object fits then.
            while True:
                hoard.append(bytearray(64))
        case "forks":
            os.fork()
            subprocess.Popen(["sleep", "3600"], process_group=0)
    return {"text": "nonsense", "number": 1, "none": None}.get(misdeed, "fine")


class Counter:
    """Answers each reply with the number and the text of all so far. Done after a reply `stop`."""

    def __init__(self, prompt):
        self.method, _, self.misdeed = prompt.key.partition(" ")
        self.replies: list[str] = []
        if self.method == "environment":
            misbehave(self.misdeed)

    def reset(self, prompt):
        nonsense = {"strings": ["hello"], "large": [("user", "x" * (10 << 20))]}
        if self.method == "reset" and self.misdeed in nonsense:
            return nonsense[self.misdeed]
        answer = misbehave(self.misdeed) if self.method == "reset" else "fine"
        return [("user", f"begin {prompt.key}")] if answer == "fine" else answer

    def step(self, reply, finished):
        self.replies.append(reply)
        nonsense = {
            "nan": Turn(reward=float("nan")),
            "large": Turn([("user", "x" * (10 << 20))]),
            "strings": Turn(["hello"]),  # type: ignore[list-item]
            "tuple": ([("user", "hello")], 1.0),
        }
        if self.method == "step" and self.misdeed in nonsense:
            return nonsense[self.misdeed]
        answer = misbehave(self.misdeed) if self.method == "step" and len(self.replies) == 2 else "fine"
        text = f"{len(self.replies)} {' '.join(self.replies)}"
        return Turn([("user", text)], 0.5, reply == "stop", {"turns": 1.0}) if answer == "fine" else answer

    def close(self):
        if self.method == "close":
            misbehave(self.misdeed)


class HostileEnvironments:
    """Each prompt key makes another environment, so there need be no prompts."""

    name = "hostile"

    def prompts(self):
        return [Prompt("p", "question")]

    def held_out(self):
        return []

    def environment(self, prompt):
        return Counter(prompt)


class Coroutines(HostileEnvironments):
    """Its methods wait until as many as named in the reply are under way."""

    def environment(self, prompt):
        return _Waiting()


class _Waiting:
    under_way = 0

    async def reset(self, prompt):
        return ()

    async def step(self, reply, finished):
        if reply in ("late", "stubborn"):
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                if reply == "late":
                    raise
            return Turn()
        _Waiting.under_way += 1
        while _Waiting.under_way < int(reply):
            await asyncio.sleep(0.01)
        return Turn([("user", reply)], done=True)

    async def close(self):
        pass


class Shared(HostileEnvironments):
    """Answers with the number of steps of all episodes of the process."""

    steps = 0

    def environment(self, prompt):
        return self if prompt.key == "shared" else Counter(prompt)

    def reset(self, prompt):
        return ()

    def step(self, reply, finished):
        self.steps += 1
        return Turn([("user", f"{os.getpid()} {self.steps}")])

    def close(self):
        pass


class Luck(Shared):
    """The same, and says that it is random."""

    random = True
