"""[search]: generation, and the engine arguments of vLLM that tba sets itself."""

import ast
import difflib
import math
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from tba.common.config.section import (
    BearerToken,
    Fraction,
    GpuList,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
    matching,
)
from tba.common.errors import ConfigError
from tba.common.wire.fields import MAX_TOKENS, MAX_TURNS
from tba.common.wire.socket_files import LEAST_TOKEN, LOOPBACK

# What `max_in_flight = "auto"` is for the Transformers engine: its KV cache grows, so nothing limits the number.
TRANSFORMERS_IN_FLIGHT = 256
# The most probable token alone has more, in a vocabulary of up to a million.
_ONE_TOKEN = 1e-6
# One value, several to draw from, or the two ends of a range.
Explored = float | tuple[float, ...] | dict[Literal["min", "max"], float]


class SearchSection(Section):
    """Generation: the engine, its devices, and exploration."""

    engine: Literal["transformers", "vllm"] = "vllm"
    """The generation engine."""
    policy: str = ""
    """What the searchers serve, if not the newest weights of the run: a model directory of the same tokenizer or a kept
    snapshot (`v40`), as explorers (docs/objectives.md)."""
    gpus: GpuList = "all"
    """One searcher on each: `0-6`, `0,2,4`, UUIDs, `all` (`tba run`: without the trainer's); or `cpu`."""
    tensor_parallel: Positive = 1
    """vLLM: consecutive GPUs per searcher."""
    cpu_searchers: Positive = 1
    """Searchers if `gpus` is `cpu`."""
    samples_per_prompt: Positive = 24
    """S: responses per visit of a prompt, at most 4096, and 8,388,608 tokens if all have `max_tokens`."""
    max_in_flight: Positive | Literal["auto"] = "auto"
    """Maximum responses that one engine generates at once. auto: vLLM what its KV cache holds with half of their
    `max_tokens`, at most 512 on a GPU and 256 on a CPU; Transformers 256."""
    put: Literal["group", "sample"] = "group"
    """group: responses to a visit are sent together, as episodes always are; sample: each when it has its reward, so
    that a killed searcher loses none of these (docs/outages.md)."""
    temperature: Explored = 1.0
    """One value, several to draw from (`[0.7, 1.0, 1.3]`), or a range (`{min = 0.7, max = 1.3}`). 0 is greedy."""
    top_p: Explored = 1.0
    """Nucleus sampling: one value, several or a range. The tokens that top_p, top_k and min_p leave are stored, so that
    ratios to the sampler are exact (docs/objectives.md). vLLM needs top_k for that."""
    top_k: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0
    """Sampling from this many most probable tokens; 0 is all."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Sampling from tokens with at least this fraction of the probability of the most probable, at the temperature."""
    explore: Literal["sample", "group", "searcher"] = "sample"
    """Temperature and top_p are drawn for each response, each visit of a prompt, or once per searcher."""
    guided: Fraction = 0.0
    """Share of the visits whose responses begin with a part of the task's demonstration (docs/tasks.md)."""
    max_tokens: Positive = 512
    """Maximum tokens of a response; of an episode, of everything after its first context."""
    turn_tokens: NonNegative = 0
    """Episodes: maximum tokens that the policy samples in one turn; 0: no limit."""
    max_turns: Annotated[int, Field(ge=1, le=MAX_TURNS)] = 16
    """Episodes: maximum turns (docs/episodes.md)."""
    stop: tuple[int | str, ...] = ()
    """What ends a response besides end tokens: strings or token ids, such as `["Question:", 13]`."""
    spool_dir: Path | None = None
    """Directory of unacknowledged trajectories; by default `spool` in run.dir."""
    spool_mib: PositiveFloat = 512.0
    """Maximum MiB of one searcher's spool; when it is full, the searcher pauses."""
    canary_tolerance: PositiveFloat | None = None
    """Maximum absolute difference of the canary's log-probabilities from the trainer's; by default 1e-3 in float32, and
    0.5 in bfloat16. The mean may be a quarter of it (docs/vllm.md)."""
    max_model_len: NonNegative = 0
    """vLLM: maximum tokens of prompt plus response; 0 is the model's own limit."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """vLLM: the fraction of the GPU's memory that must be free at the start, and that it may use."""
    kv_cache_gib: PositiveFloat | Literal["auto"] = "auto"
    """vLLM: GiB of the KV cache per GPU. auto: 1 on a CPU; on a GPU what vLLM measures, which is wrong if other
    processes allocate or free memory meanwhile."""
    step_seconds: NonNegativeFloat = 300.0
    """A searcher whose engine takes longer for a step or a swap of weights exits, and is restarted; four times as long
    for the first response. 0: no limit."""
    enforce_eager: bool = False
    """vLLM: run without compilation and CUDA graphs."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """vLLM: further engine arguments, such as `{ kv_cache_dtype = "fp8", max_num_batched_tokens = 8192 }`."""
    weights_from: Literal["auto", "path", "trainer"] = "auto"
    """path: the trainer's directory, on a shared file system; trainer: its `train.serve_snapshots`; auto: the path if
    it exists on this node, else the trainer."""
    serve_snapshots: Annotated[str, matching(r"|tcp://\S+:\d+", "tcp://HOST:PORT")] = ""
    """ZeroMQ endpoint (tcp://HOST:PORT) where one searcher of this node serves snapshots to the nodes that set this
    key; HOST `*` is announced as the name of this machine."""
    serve: Annotated[str, matching(r"|([^\s:]+:|\[[0-9A-Fa-f:]+\]:)?\d{1,5}", "PORT or HOST:PORT")] = ""
    """PORT or HOST:PORT (127.0.0.1 by default) where searchers answer requests of agents (docs/endpoint.md), each at
    the first free port from there on, with port 0 at any."""
    serve_token: BearerToken = SecretStr("")
    """The bearer token, of at least 16 characters, that requests to `serve` need from other machines. It is not stored
    with the run; TBA_SEARCH__SERVE_TOKEN keeps it out of the file."""
    weights_dir: Path | None = None
    """Directory of the weights of a node's trainer and searchers: a local disk with room for four times the model. By
    default /dev/shm if it has that and 512 MiB more, else run.dir."""

    @field_validator("vllm")
    @classmethod
    def _check_vllm(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if reason := own_argument(name):
                raise ValueError(f"{name} cannot be set here: {reason}")
        return value

    @model_validator(mode="after")
    def _check_token(self) -> Self:
        token = self.serve_token.get_secret_value()
        if token and len(token) < LEAST_TOKEN:
            raise ValueError(
                f"search.serve_token needs at least {LEAST_TOKEN} characters: `openssl rand -hex 16` makes one"
            )
        if self.serve and self.policy:
            raise ValueError(
                "search.serve answers with the policy of the run: leave out search.policy, or search.serve"
            )
        if self.serve and self.serve_address[1] >= 1 << 16:
            raise ValueError(f"search.serve = {self.serve}: no port has that number")
        if self.serve and not token and self.serve_address[0] not in LOOPBACK:
            raise ValueError(
                f"search.serve = {self.serve} can be reached from other machines: set search.serve_token to a secret"
            )
        return self

    @field_validator("stop", mode="before")
    @classmethod
    def _check_stop(cls, value: Any) -> Any:
        is_list = isinstance(value, list | tuple)
        if not is_list or not all((type(one) is int and one >= 0) or (isinstance(one, str) and one) for one in value):
            raise ValueError('write a list of strings and token ids, such as ["Question:", 13]')
        return value

    @field_validator("temperature", mode="before")
    @classmethod
    def _check_temperature(cls, value: Any) -> Any:
        # vLLM raises smaller temperatures to 0.01, and the recorded temperature would be wrong.
        if any(0 < number < 0.01 or number < 0 for number in _explored_numbers(value)):
            raise ValueError("a temperature must be 0 (greedy) or at least 0.01")
        return value

    @field_validator("top_p", mode="before")
    @classmethod
    def _check_top_p(cls, value: Any) -> Any:
        if not all(0 < number <= 1 for number in _explored_numbers(value)):
            raise ValueError("top_p must be more than 0 and at most 1")
        return value

    @property
    def serve_address(self) -> tuple[str, int]:
        """Host and port of `serve`, which is set."""
        host, _, port = self.serve.rpartition(":")
        return host.strip("[]") or LOOPBACK[0], int(port)

    @property
    def is_greedy(self) -> bool:
        """Whether every response of a policy to a prompt is the same."""
        one_token = self.top_k == 1 or self.min_p == 1 or max(_explored_numbers(self.top_p)) < _ONE_TOKEN
        return one_token or max(_explored_numbers(self.temperature)) == 0

    @property
    def has_ratios(self) -> bool:
        """Whether every response is sampled, so that pi / mu can be computed; otherwise some may be greedy."""
        return min(_explored_numbers(self.temperature)) > 0

    @property
    def cuts(self) -> bool:
        """Whether top-p, top-k or min-p may leave a part of the vocabulary to sample from."""
        return min(_explored_numbers(self.top_p)) < 1 or self.top_k > 0 or self.min_p > 0


def _explored_numbers(value: Any) -> list[float]:
    """Return the numbers of an `Explored`. Raises ValueError if the value is not one."""
    if isinstance(value, dict):
        if set(value) != {"min", "max"}:
            raise ValueError("a range has two ends: { min = 0.7, max = 1.3 }")
        numbers = [value["min"], value["max"]]
    else:
        numbers = list(value) if isinstance(value, list | tuple) else [value]
    if not numbers:
        raise ValueError("the list is empty: name at least one value")
    if not all(type(number) in (int, float) and math.isfinite(number) for number in numbers):
        raise ValueError("write a number, a list of numbers, or a range { min = 0.7, max = 1.3 }")
    if isinstance(value, dict) and value["min"] > value["max"]:
        raise ValueError("the range's min is above its max")
    return numbers


_HOT_RELOAD = "hot reload of weights depends on it"
_TOKENS = "tba passes token ids and decodes responses itself"
_ONE_PROCESS = "an engine runs on the search.tensor_parallel GPUs of one searcher"

# By argument, the reason or the key to set instead.
_OWN = {
    "model": "set model.path",
    "dtype": "set model.dtype",
    "seed": "set run.seed, from which each searcher's seed follows",
    **dict.fromkeys(("tokenizer", "tokenizer_mode", "skip_tokenizer_init"), _TOKENS),
    "max_model_len": "set search.max_model_len",
    "max_num_seqs": "set search.max_in_flight",
    "tensor_parallel_size": "set search.tensor_parallel",
    "enforce_eager": "set search.enforce_eager",
    "gpu_memory_utilization": "set search.gpu_memory_utilization",
    "kv_cache_memory_bytes": "set search.kv_cache_gib",
    **dict.fromkeys(("enable_lora", "max_loras", "max_lora_rank"), "set lora.rank and lora.publish"),
    "logprobs_mode": "recorded log-probabilities must be those of the distribution that was sampled from",
    "generation_config": "each request defines its sampling",
    "return_sampling_mask": "it is on if search.top_p, top_k or min_p and the objective need it",
    "scheduling_policy": "the canary must come before other requests",
    **dict.fromkeys(("worker_extension_cls", "load_format", "model_loader_extra_config"), _HOT_RELOAD),
    "runner": "a searcher generates",
    **dict.fromkeys(("pipeline_parallel_size", "distributed_executor_backend", "nnodes"), _ONE_PROCESS),
}


def check_arguments(names: Collection[str], known: Collection[str]) -> None:
    """Raise ConfigError for the first name of `search.vllm` that is not among the engine arguments of this vLLM."""
    for name in names:
        if name not in known:
            near = [one for one in difflib.get_close_matches(name, known, n=3) if own_argument(one) is None]
            hint = f"did you mean {' or '.join(near)}?" if near else "see the engine arguments in vLLM's documentation"
            raise ConfigError(f"search.vllm: vLLM has no engine argument {name!r}: {hint}")


def installed_arguments() -> list[str]:
    """Return the engine arguments of the vLLM that is installed here; [] if there is none, or its source differs."""
    found = find_spec("vllm")
    if found is None or found.origin is None:
        return []
    try:
        tree = ast.parse((Path(found.origin).parent / "engine/arg_utils.py").read_bytes())
    except (OSError, SyntaxError):
        return []
    fields = (
        field.target
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"
        for field in node.body
        if isinstance(field, ast.AnnAssign)
    )
    return [target.id for target in fields if isinstance(target, ast.Name)]


def own_argument(name: str) -> str | None:
    """Return why `search.vllm` must not set an argument, or None if it may."""
    if name.startswith("data_parallel"):
        return _ONE_PROCESS
    return _OWN.get(name)
