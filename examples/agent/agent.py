"""An agent that guesses numbers with a run's policy, and gives the run its games to train on: README.md."""

import json
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from openai import APIConnectionError, OpenAI

# The model of the example reads only digits and signs. For a chat model, write sentences.
QUESTION, HIGHER, LOWER, GUESSES = "0-9=", "+=", "-=", 4


def play(policy: OpenAI, secret: int) -> dict[str, Any]:
    """Play one game. Returns its trace: the calls with the tokens as they were sampled, and the reward."""
    messages, calls, guess = [{"role": "user", "content": QUESTION}], [], None
    while guess != secret and len(calls) < GUESSES:
        asked = {"messages": messages, "temperature": 1.0, "logprobs": True, "extra_body": {"return_token_ids": True}}
        answer: Any = policy.chat.completions.create(model="policy", **asked)  # type: ignore[call-overload]
        choice = answer.choices[0]
        call = {"node_id": answer.id, "prompt_token_ids": answer.prompt_token_ids}
        call |= {"completion_token_ids": choice.token_ids, "request": {"messages": messages}}
        call["per_token_logps"] = [token.logprob for token in choice.logprobs.content]
        call["loss_mask"] = [0] * len(answer.prompt_token_ids) + [1] * len(choice.token_ids)
        said = choice.model_dump(include={"message", "finish_reason", "version_spans"})
        call["response"] = {"run": answer.run, "choices": [said]}
        call["metadata"] = {"model": answer.model, "sampling_params": {"temperature": asked["temperature"]}}
        calls.append(call)
        number = re.search(r"\d+", choice.message.content)
        guess = int(number[0]) if number else -1
        hint = {"role": "user", "content": HIGHER if guess < secret else LOWER}
        messages = [*messages, {"role": "assistant", "content": choice.message.content}, hint]
    won = float(guess == secret)
    calls[-1]["metadata"] |= {
        "verify": {"env_reward": won, "metrics": {"guesses": len(calls)}},
        "prompt_key": f"guess {secret}",
    }
    return {"schema_version": 1, "turns": calls}


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
        # A file for each round: an import reads all of a file that has grown.
        file = folder / f"{time.time_ns()}.jsonl"
        file.write_text("".join(json.dumps(trace) + "\n" for trace in traces))
        subprocess.run([sys.executable, "-m", "tba", "buffer", "import", str(file), "-c", config], check=True)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:3], *map(int, sys.argv[3:]))
    except APIConnectionError:
        sys.exit(f"no searcher answers at {sys.argv[1]}: the run has ended, or has not started")
