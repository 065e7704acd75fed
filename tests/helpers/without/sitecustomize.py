"""Hide packages from a process and from those that it starts, as if they were not installed.

Python imports this module at its start if its folder is on PYTHONPATH, as in the environment that `without` in
tests/optional_packages.py returns. WITHOUT_PACKAGES has the names of modules, separated by spaces.
"""

import os
import sysconfig
from importlib.machinery import PathFinder
from typing import Any

_HIDDEN = set(os.environ.get("WITHOUT_PACKAGES", "").split())
# A package that a test writes elsewhere is found.
_INSTALLED = tuple(sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib"))
_find_spec = PathFinder.find_spec
_find_distributions = PathFinder.find_distributions


# Class methods, as those that they replace: pytest keeps `PathFinder.find_spec` as an attribute of its own class.
@classmethod  # type: ignore[misc]
def find_spec(_: type, name: str, *arguments: Any, **keywords: Any) -> Any:
    spec = _find_spec(name, *arguments, **keywords)
    if spec is not None and name in _HIDDEN:
        places = [spec.origin or "", *(spec.submodule_search_locations or ())]
        if any(place.startswith(_INSTALLED) for place in places):
            return None
    return spec


@classmethod  # type: ignore[misc]
def find_distributions(_: type, *arguments: Any, **keywords: Any) -> Any:
    found = _find_distributions(*arguments, **keywords)
    return (one for one in found if one.name.replace("-", "_").lower() not in _HIDDEN)


PathFinder.find_spec = find_spec  # type: ignore[assignment]
PathFinder.find_distributions = find_distributions  # type: ignore[assignment]
