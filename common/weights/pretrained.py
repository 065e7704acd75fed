"""Load models, configurations and tokenizers with transformers, without running code of the model's directory.

Without `trust_remote_code` transformers asks on standard input whether to run such code, and any "y" there allows it.
So no other file calls `from_pretrained` or `from_config`; a test finds any that does.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tba.common.errors import ConfigError, first_line
from tba.common.weights.model_files import read_json

_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers")
# Of any model. Transformers builds them all, for minutes or hours, before it looks at the first weight.
_MOST_LAYERS = 2_000


def from_directory(kind: Any, directory: Path, **options: Any) -> Any:
    """Return `kind.from_pretrained(directory)`, such as AutoTokenizer's. Errors of transformers are not converted.

    Raises ConfigError if the directory needs code of its own or a package that is missing, if its configuration has
    values of another type, no layers or thousands of them, and if it holds anything but files and directories.
    """
    _check_config(directory)
    with _refusing_code(directory):
        return kind.from_pretrained(directory, trust_remote_code=False, **options)


def from_config(kind: Any, config: Any, directory: Path, **options: Any) -> Any:
    """Return `kind.from_config(config)`, a model without weights. Raises as `from_directory`, which read `config`."""
    with _refusing_code(directory):
        return kind.from_config(config, trust_remote_code=False, **options)


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
        for name in _LAYERS:
            if isinstance(count := part.get(name), int) and not 1 <= count <= _MOST_LAYERS:
                raise ConfigError(
                    f"{directory / 'config.json'}: {name} is {count}, and a model has at least 1 and at most "
                    f"{_MOST_LAYERS}"
                )
