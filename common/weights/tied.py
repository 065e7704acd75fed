"""Which names of a loaded model are one tensor: read from its modules, because files and config.json may disagree.

A file may hold a copy of a tied head, or a head of its own where config.json says that it is tied; then transformers
and vLLM compare the two when they load them.
"""

from typing import Any


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
