"""Load models, configurations and tokenizers with transformers, without running code of the model's directory.

Without `trust_remote_code` transformers asks on standard input whether to run such code, and any "y" there allows it.
So no other file calls `from_pretrained` or `from_config`; a test finds any that does.
"""

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tba.common.errors import ConfigError, MissingExtra, first_line, quantity
from tba.common.system.load_errors import loading
from tba.common.system.process import importing
from tba.common.weights.model_files import config_here, eos_ids, need_tokenizer, read_json, vocabulary_size

_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers")
_DTYPE = re.compile(r"b?float\d*(_\w+)?|half|double")
# By name in config.json, whether a value can be used.
_USABLE: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("dtype", "torch_dtype"), lambda one: not isinstance(one, str) or bool(_DTYPE.fullmatch(one))),
    "quantization_config": lambda one: isinstance(one, dict) and bool(one),
    # Without it the model returns tuples, whose places have no names.
    "return_dict": bool,
}
# Of any model. Transformers builds them all, for minutes or hours, before it looks at the first weight.
_MOST_LAYERS = 2_000
_FAST = 'set "tokenizer_class": "PreTrainedTokenizerFast" in tokenizer_config.json'
_REFERENCE = ("the model", "reference.path", "a reference")


def from_directory(kind: Any, directory: Path, **options: Any) -> Any:
    """Return `kind.from_pretrained(directory)`, such as AutoTokenizer's. Errors of transformers are not converted.

    Raises ConfigError if the directory needs code of its own or a package that is missing, if its configuration has
    values of another type, no layers or thousands of them, and if it holds anything but files and directories.
    """
    _check_config(directory)
    with _refusing_code(directory):
        return _capped(kind.from_pretrained(directory, trust_remote_code=False, **options))


def causal_model(directory: Path, dtype: Any) -> Any:
    """Load a causal language model. Raises as `from_directory`, and ConfigError if its files lack a weight."""
    from transformers import AutoModelForCausalLM

    options = {"dtype": dtype, "use_safetensors": True, "output_loading_info": True}
    model, info = from_directory(AutoModelForCausalLM, directory, **options)
    if missing := info["missing_keys"]:
        # transformers would initialise them at random.
        lacking = quantity(len(missing), "weight")
        raise ConfigError(f"the files in {directory} lack {lacking} of the model, {min(missing)} for one")
    return model.eval()


def from_config(kind: Any, config: Any, directory: Path, **options: Any) -> Any:
    """Return `kind.from_config(config)`, a model without weights. Raises as `from_directory`, which read `config`."""
    with _refusing_code(directory):
        return _capped(kind.from_config(config, trust_remote_code=False, **options))


def _capped(loaded: Any) -> Any:
    # Gemma2 and VaultGemma: sdpa ignores the cap.
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    config: Any = getattr(model, "config", None)
    cap = config and getattr(config.get_text_config(), "attn_logit_softcapping", None)
    if cap and config._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")
    return loaded


@contextlib.contextmanager
def _refusing_code(directory: Path) -> Iterator[None]:
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except ImportError as error:
        raise ConfigError(f"{directory} needs a package that is not installed: {first_line(error)}") from error
    # What transformers raises for values of another type, depending on who reads them first.
    except (TypeError, AttributeError, StrictDataclassError) as error:
        raise ConfigError(f"{directory}: a value of its JSON files has another type: {first_line(error)}") from error
    except ValueError as error:
        if "custom code" not in str(error):
            raise
        raise ConfigError(
            f"{directory} needs Python code of its own (auto_map in its JSON files), which tba does not run: use a "
            "model that transformers itself supports"
        ) from error


def _check_config(directory: Path) -> None:
    # A reader would wait for the writer of a FIFO, and come to no end of a device.
    for path in directory.glob("*"):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ConfigError(f"{path} is neither a file nor a directory: remove it")
    config: dict[str, Any] = {}
    # What is wrong with the file is the library's to say.
    with contextlib.suppress(OSError, ValueError):
        config = read_json(directory / "config.json")
    # Some releases of transformers download such an implementation from the hub, and import it.
    if kernels := [key for key, value in config.items() if key.endswith("_implementation") and "/" in str(value)]:
        raise ConfigError(f"{directory / 'config.json'}: {kernels[0]} names code of the hub, which tba does not run")
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    for part in parts:
        for name, is_usable in _USABLE.items():
            if (value := part.get(name)) is not None and not is_usable(value):
                raise ConfigError(
                    f"{directory / 'config.json'}: {name} = {value!r:.60} cannot be used: correct or remove it"
                )
        for name in _LAYERS:
            if isinstance(count := part.get(name), int) and not 1 <= count <= _MOST_LAYERS:
                raise ConfigError(
                    f"{directory / 'config.json'}: {name} is {count}, and a model has at least 1 and at most "
                    f"{_MOST_LAYERS}"
                )


def refuse_quantized(path: str) -> None:
    """Raise ConfigError if the weights of a model here that is to be trained are quantized. A frozen one may be."""
    config = read_json(directory / "config.json") if (directory := config_here(path)) else {}
    parts = [part for part in (config, *config.values()) if isinstance(part, dict)]
    if keys := [key for part in parts for key in ("quantization_config", "compression_config") if part.get(key)]:
        # Without a kernel for them transformers makes plain weights of them, which would not be saved as they were.
        raise ConfigError(
            f"the weights in {directory} are quantized ({keys[0]} in config.json), and cannot be trained: "
            "use the model that they were made of, or one that was saved with plain weights"
        )


def tied_names(model: Any) -> dict[str, str]:
    """Map each further name of a parameter to the one under which it is saved, for a model of transformers or vLLM."""
    names_of: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    # The names that transformers does not save. It may list one whose tensor is not tied in this model.
    unsaved = getattr(model, "all_tied_weights_keys", {})
    tied: dict[str, str] = {}
    for names in names_of.values():
        saved = next((name for name in names if name not in unsaved), names[0])
        tied |= {name: saved for name in names if name != saved}
    return tied


# What texts of every kind have: spaces, digits, line breaks.
_ROUND_TRIP = "How are you, 12 friends?\n\n  Two spaces."


def load_tokenizer(directory: Path) -> Any:
    """Load the tokenizer of a model directory. Raises ConfigError if it fails or loses spaces, MissingExtra."""
    try:
        with importing():
            from transformers import AutoTokenizer
    except ModuleNotFoundError:
        raise MissingExtra("transformers", "train") from None
    try:
        # Without it, transformers takes Mistral's own format where both are there.
        options = {"mistral_format": False} if (directory / "tokenizer.json").exists() else {}
        tokenizer = from_directory(AutoTokenizer, directory, **options)
        if not isinstance(tokenizer.added_tokens_decoder, dict):
            raise ConfigError(
                f"{directory} has a tokenizer in Mistral's own format alone (tekken.json): add the tokenizer.json and "
                "tokenizer_config.json of its repository, or of a conversion"
            )
    # transformers raises many kinds of errors here; all mean that the files are not a tokenizer.
    except Exception as error:
        if isinstance(error, ConfigError) and not isinstance(error.__cause__, TypeError | AttributeError):
            raise
        if directory.is_dir():
            need_tokenizer(os.listdir(directory), str(directory), "the model")
        raise ConfigError(f"{directory} has no tokenizer that loads: {_why_none_loads(directory, error)}") from error
    _check_round_trip(directory, tokenizer)
    return tokenizer


def _why_none_loads(directory: Path, error: Exception) -> str:
    cause = first_line(error.__cause__ if isinstance(error, ConfigError) and error.__cause__ else error)
    pieces = [path.name for path in directory.glob("*.model")]
    if not (directory / "tokenizer.json").exists():
        missing = pieces and find_spec("sentencepiece") is None
        return f"{cause}; to read {pieces[0]} alone, pip install '.[sentencepiece]'" if missing else cause
    with contextlib.suppress(Exception):
        from transformers import PreTrainedTokenizerFast

        from_directory(PreTrainedTokenizerFast, directory)
        return f"its class in transformers does not read its tokenizer.json ({cause}): {_FAST}"
    return cause


def end_tokens(directory: Path, stop: Collection[str | int], tokenizer: Any = None) -> tuple[list[int], list[str]]:
    """Return what ends a response: token ids, the model's own first, and the strings of `stop`, which is `search.stop`.

    For search, evaluation, `tba sft`, training and export. The tokenizer is loaded if none is given and the directory
    has one. Raises ConfigError for malformed end tokens, and as `split_stop`.
    """
    if tokenizer is None:
        with contextlib.suppress(ConfigError, MissingExtra):
            tokenizer = load_tokenizer(directory)
    ids, strings = split_stop(stop, tokenizer)
    return list(dict.fromkeys([*eos_ids(directory, getattr(tokenizer, "eos_token_id", None)), *ids])), strings


def split_stop(stop: Collection[str | int], tokenizer: Any) -> tuple[list[int], list[str]]:
    """Return the ids of `search.stop` and its strings. A string that is a special token means its id.

    Raises ConfigError for a string that contains one among other characters.
    """
    # Decoding leaves these out.
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {token.content: id_ for id_, token in added.items() if token.special}
    ends = [special.get(one, one) if isinstance(one, str) else one for one in stop]
    strings = [one for one in ends if isinstance(one, str)]
    if inside := [(one, token) for one in strings for token in special if token in one]:
        raise ConfigError(
            f"search.stop: {inside[0][0]!r} contains the special token {inside[0][1]!r}, which is not part of the text "
            "of a response: name the token alone"
        )
    return [one for one in ends if not isinstance(one, str)], strings


def check_same_tokens(
    sampler: Path, scorer: Path, *, names: tuple[str, str, str] = _REFERENCE, further: bool = True
) -> None:
    """Raise ConfigError unless the model of `scorer` can score every token that the one of `sampler` may sample.

    Both are model directories. Each token of the sampler's tokenizer must have the same id in the scorer's, which may
    have `further` ones, such as those of a newer chat template, and embeddings of at least as many ids. `names` are
    those of both, and what the user is told to replace.
    """
    sampling, scoring, replaced = names
    own, other = (load_tokenizer(directory).get_vocab() for directory in (sampler, scorer))
    pairs = own.items() - other.items() if further else own.items() ^ other.items()
    differing = sorted({(own.get(token, id_), token) for token, id_ in pairs})
    if differing:
        _, token = differing[0]
        raise ConfigError(
            f"{scoring} {scorer} has another tokenizer than {sampling}: {len(differing)} of {len(own)} tokens have "
            f"another id or none, such as {token!r}, which is {own.get(token)} in {sampling} and {other.get(token)} "
            f"there: use {replaced} with the same tokenizer"
        )
    own_size, size = _embedded(sampler), _embedded(scorer)
    if size < own_size:
        raise ConfigError(
            f"{scoring} {scorer} has {size} token ids, and {sampling} {own_size}: {sampling} could sample what "
            f"{scoring} has no embedding of: use {replaced} with as many"
        )


def _embedded(directory: Path) -> int:
    """Return the number of token ids of a model. A config.json may leave out the default of its kind of model."""
    if (known := vocabulary_size(directory)) is not None:
        return known
    from transformers import AutoConfig

    with loading(f"the configuration of the model in {directory}"):
        size: int = from_directory(AutoConfig, directory).get_text_config().vocab_size
    return size


def _check_round_trip(directory: Path, tokenizer: Any) -> None:
    """Raise ConfigError if the class of transformers changes a text that tokenizer.json keeps (transformers #45488)."""
    kind = f"{directory}: transformers reads its tokenizer as {type(tokenizer).__name__}, which"
    try:
        ids = tokenizer.encode(_ROUND_TRIP, add_special_tokens=False)
        found = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    # The library raises bare Exceptions.
    except Exception as error:
        raise ConfigError(f"{kind} cannot encode a text ({first_line(error)}): {_FAST}") from error
    path = directory / "tokenizer.json"
    if found == _ROUND_TRIP or not path.is_file():
        return
    from tokenizers import Tokenizer

    plain = Tokenizer.from_file(str(path))
    if plain.decode(plain.encode(_ROUND_TRIP, add_special_tokens=False).ids) == _ROUND_TRIP:
        raise ConfigError(f"{kind} turns {_ROUND_TRIP!r} into {found!r:.200}; tokenizer.json alone keeps it: {_FAST}")
