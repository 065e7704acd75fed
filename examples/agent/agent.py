"""An agent that guesses numbers with a run's policy, and gives the run its games to train on: README.md."""

import json
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from openai import OpenAI

# The model of the example reads only digits and signs. For a chat model, write sentences.
QUESTION, HIGHER, LOWER, GUESSES = "0-9=", "+=", "-=", 4


def play(policy: Any, secret: int) -> dict[str, Any]:
    """Play one game. Returns its trace: the calls with the tokens as they were sampled, and the reward."""
    messages, calls, guess = [{"role": "user", "content": QUESTION}], [], None
    ask = {"model": "policy", "logprobs": True, "extra_body": {"return_token_ids": True}}
    while guess != secret and len(calls) < GUESSES:
        answer = policy.chat.completions.create(messages=messages, **ask)
        calls.append(trace_of(answer, messages))
        text = answer.choices[0].message.content
        guess = int((re.findall(r"\d+", text) or [-1])[0])
        hint = HIGHER if guess < secret else LOWER
        messages = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": hint}]
    calls[-1]["metadata"] |= {"prompt_key": f"guess {secret}", "verify": {"env_reward": float(guess == secret)}}
    return {"schema_version": 1, "turns": calls}


def trace_of(answer: Any, messages: list[dict[str, str]]) -> dict[str, Any]:
    """Return a call of the model in OpenEnv's form."""
    prompt, choice = answer.prompt_token_ids, answer.choices[0]
    return {
        "node_id": answer.id,
        "prompt_token_ids": prompt,
        "completion_token_ids": choice.token_ids,
        "per_token_logps": [token.logprob for token in choice.logprobs.content],
        "loss_mask": [0] * len(prompt) + [1] * len(choice.token_ids),
        "request": {"messages": messages},
        "response": answer.model_dump(include={"run", "choices"}),
        "metadata": {"model": answer.model},
    }


def main(url: str, config: str, rounds: int, games: int) -> None:
    # It waits for the first weights: the endpoint answers 503 until then.
    policy = OpenAI(base_url=url, api_key="none", max_retries=20)
    folder = Path("runs/agent-traces")
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(rounds):
        with ThreadPoolExecutor(16) as threads:
            traces = list(threads.map(lambda secret: play(policy, secret), [*range(10)] * games))
        won = sum(trace["turns"][-1]["metadata"]["verify"]["env_reward"] for trace in traces)
        print(f"round {number}: won {won:.0f} of {len(traces)}", flush=True)
        file = folder / f"{time.time_ns()}.jsonl"
        file.write_text("".join(json.dumps(trace) + "\n" for trace in traces))
        subprocess.run([sys.executable, "-m", "tba", "buffer", "import", str(file), "-c", config], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
