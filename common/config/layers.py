"""The layers of the configuration: a flag wins over an environment variable, then the file, then the default.

Each layer is a flat map from dotted keys (`train.learning_rate`) to values with their origin.
"""

import difflib
import os
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from tba.common.config import Config, Section
from tba.common.errors import ConfigError, UsageError, first_problem
from tba.common.system.process import PARENT_VARIABLE, RENDEZVOUS_VARIABLE

ENVIRONMENT_PREFIX = "TBA_"
