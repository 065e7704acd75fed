"""All checks before a run, as one list.

`tba doctor` shows what they find on this machine, `tba run --dry-run` also what the start of the run asks of them, and
`tba run` makes those of the start, which are quick. All say the same about the same problem.
"""

import platform
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tba.buffer.store.starts import refuse_other_work
from tba.buffer.tools.stats import read_results
from tba.common.config import Config
from tba.common.config.layers import value_of
from tba.common.config.paths import (
    asked_gpus,
    asked_packages,
    check_data,
    check_gpus_apart,
    check_paths,
    hub_data,
    unused_models,
)
from tba.common.errors import HttpUnavailable, HubUnavailable, MissingExtra, StorageError, TbaError, UsageError
from tba.common.system.devices import Gpu, choose_gpus, list_gpus, need_gpus
from tba.common.terminal import need
from tba.common.weights.model_files import check_hub, check_model, is_hub_name, model_here, weight_files
from tba.common.weights.pretrained import check_same_tokens, refuse_quantized
from tba.common.weights.tensor_file import read_layout
from tba.deploy import doctor
from tba.deploy.doctor import Result
from tba.deploy.fleet import searcher_groups
from tba.deploy.run_directory import refuse_start
from tba.searcher.build import check_reward_model, check_task_and_prompts, find_policy
from tba.trainer.preflight.before_start import model_parameters, trainer_memory


@dataclass(frozen=True, slots=True)
class Plan:
    """What is checked: a configuration, and where and how it is to run."""

    config: Config
    assumed: Sequence[Gpu] | None = None
    """The GPUs of a node that is not this one: then only what does not depend on this machine is checked."""
    resume: bool = False
    starts: bool = False
    """All roles start here: what one of them lacks is a failure, and no warning."""
    loads: bool = False
    """A task of code is loaded even if that downloads data."""
    strict: bool = False
    """What a searcher or a trainer lacks is a failure, as if all roles started here."""

    @property
    def here(self) -> bool:
        """Whether it is to run on this machine."""
        return self.assumed is None

    @property
    def gpus(self) -> Sequence[Gpu]:
        """The GPUs to run on."""
        return list_gpus() if self.assumed is None else self.assumed


@dataclass(frozen=True, slots=True)
class Check:
    """One check. Both functions raise TbaError for a failure, with a sentence on what to do."""

    name: str
    run: Callable[[Plan], Result]
    """Returns ok, warn, fail or unchecked, with a sentence."""
    start: Callable[[Plan], object] | None = None
    """What the start of a run asks: quick, and without the hub."""
    anywhere: bool = False
    """Whether it says something of a node that is not this one."""
    of_role: str = ""
    """The setting for which a searcher or a trainer needs it, and the buffer does not; empty: every role needs it."""
    of_start: bool = False
    """Whether only a start asks for it."""


class Finding(NamedTuple):
    """What a check has found: ok, warn, fail or unchecked, with a sentence, and the error that it raised."""

    check: str
    result: str
    detail: str
    error: TbaError | None = None


COLUMNS = Finding._fields[:3]


def as_rows(findings: Sequence[Finding]) -> list[dict[str, str]]:
    """Return what is printed of findings."""
    return [dict(zip(COLUMNS, finding[:3], strict=True)) for finding in findings]


def examine(plan: Plan, only: Collection[str] = ()) -> list[Finding]:
    """Run all checks of a plan, or `only` those of these names. Raises UsageError for another name."""
    checks = [check for check in CHECKS if (plan.here or check.anywhere) and (plan.starts or not check.of_start)]
    names = [check.name for check in checks]
    if unknown := [name for name in only if name not in names]:
        of_node = "" if plan.here else " with --assume"
        raise UsageError(f"there is no check {', '.join(unknown)}{of_node}: the checks are {', '.join(names)}")
    found = [_outcome(check, plan) for check in checks if check.name in only or not only]
    # Several checks say of a configuration for the CPU that it has no GPU.
    return found if only else [finding for finding in found if finding.detail != doctor.NO_GPU]


def check_start(plan: Plan) -> None:
    """Raise the first error of what the start of a run asks."""
    for check in CHECKS:
        if check.start is not None:
            check.start(plan)


def _outcome(check: Check, plan: Plan) -> Finding:
    try:
        result, detail = check.run(plan)
        if result != "fail" and plan.starts and check.start not in (None, check.run):
            check.start(plan)
    except TbaError as error:
        # Another node may have it, and not every role needs it.
        if check.of_role and isinstance(error, MissingExtra | HubUnavailable):
            lacks = "fail" if plan.starts or plan.strict else "warn"
            setting = f"{check.of_role} = {value_of(plan.config, check.of_role)}: "
            detail = f"{setting if isinstance(error, MissingExtra) else ''}{error}; a role here needs it"
            return Finding(check.name, lacks if plan.here else "unchecked", detail, error)
        return Finding(check.name, "fail", str(error), error)
    # The engine of a run starts on this machine. A task that only seems wrong does not prevent a run.
    return Finding(check.name, "fail" if result == "warn" and check.run is _engine and plan.starts else result, detail)


def _settings(plan: Plan) -> Result:
    notes = check_paths(plan.config, here=plan.here)
    return "ok", "; ".join(notes) or "settings go together, and the files that they name exist"


def _run_directory(plan: Plan) -> Result:
    database = plan.config.database
    try:
        results = read_results(database) if database.exists() else []
    # The buffer says what is wrong with a file that cannot be read.
    except StorageError:
        results = []
    refuse_start(plan.config, results, resume=plan.resume)
    refuse_other_work(plan.config)
    return "ok", str(plan.config.run.dir)


def _need_packages(plan: Plan) -> None:
    for _, module, extra in asked_packages(plan.config):
        need(module, extra)


def _gpus(plan: Plan) -> Result:
    config, asked, present = plan.config, asked_gpus(plan.config), plan.gpus
    need_gpus(asked, present)
    for key, wanted in asked.items():
        choose_gpus(wanted, present, key)
    known = "present" if plan.here else "assumed"
    return "ok", f"{len(present)} {known}; search.gpus = {config.search.gpus}, train.gpu = {config.train.gpu}"


def _gpus_of_start(plan: Plan) -> None:
    """Raise also for GPUs that are busy, and for one that an engine and the trainer both fill."""
    config, asked = plan.config, asked_gpus(plan.config)
    if not asked:
        return
    present = plan.gpus
    need_gpus(asked, present)
    if "search.gpus" in asked:
        searcher_groups(config, with_trainer=True, present=present)
    if "train.gpu" in asked:
        choose_gpus(config.train.gpu, present, "train.gpu")
    if len(asked) == 2:
        check_gpus_apart(config, present)


def _model(setting: str, path: str) -> Result:
    """Check a model of this machine, with the headers of its weights, or ask the hub for it."""
    found = path if check_model(path, setting=setting) else check_hub(path, setting=setting)
    if (directory := model_here(path)) is not None:
        for file in weight_files(directory):
            read_layout(file)
    if setting == "model.path":
        refuse_quantized(path)
    return "ok", found


def _policy(plan: Plan) -> Result:
    policy = plan.config.search.policy
    if not policy:
        return "ok", "searchers serve the newest weights of the run"
    if model_here(plan.config.model.path) is None:
        return "unchecked", f"{policy}: its tokenizer is compared with that of model.path once that is here"
    find_policy(plan.config)
    if plan.starts:
        return "warn", f"every searcher of the run serves {policy}, and none the policy that is trained"
    return "ok", f"searchers serve {policy} and never reload it"


def _embedder(plan: Plan) -> Result:
    path = plan.config.eval.embedder
    if not path or "eval.embedder" in unused_models(plan.config):
        return "ok", "no evaluation of this run uses one"
    return _model("eval.embedder", path)


def _teacher(plan: Plan) -> Result:
    path = plan.config.reference.path
    if not path:
        return "ok", "the reference is model.path"
    result = _model("reference.path", path)
    policy, teacher = model_here(plan.config.model.path), model_here(path)
    if policy is None or teacher is None:
        return "unchecked", f"{result[1]}; its tokenizer is compared with the model's at the start"
    check_same_tokens(policy, teacher)
    return result


def _reward_model(plan: Plan) -> Result:
    section = plan.config.reward_model
    if not section.configured:
        return "ok", "none is configured"
    if not section.url and is_hub_name(section.path) and model_here(section.path) is None:
        return _model("reward_model.path", section.path)
    try:
        return "ok", check_reward_model(section)
    except MissingExtra as error:
        return ("fail" if plan.starts else "unchecked"), f"{section.source}: {error}; a role here needs it"
    except HttpUnavailable as error:
        return "unchecked", f"{error}; start the server before the run"


def _memory(plan: Plan) -> Result:
    report = trainer_memory(plan.config, plan.assumed)
    if isinstance(report, str):
        return "unchecked", report
    if report.fits:
        return "ok", report.sentence()
    return ("fail" if plan.config.train.check_memory else "warn"), report.sentence()


def _task(plan: Plan) -> Result:
    task = plan.config.task
    check_data(task)
    if (remote := hub_data(task)) and not (plan.loads and task.checked_by_loading):
        _need_hub(plan)
        return "unchecked", f"{', '.join(remote)}: data of the hub, downloaded at the start"
    if warning := check_task_and_prompts(plan.config):
        return "warn", warning
    return "ok", ", ".join(one.train if one.reads_files else one.name for one in task.sources)


def _need_hub(plan: Plan) -> None:
    if plan.here and hub_data(plan.config.task):
        need("datasets", "hub")


def _of_machine(check: Callable[[Config], Result]) -> Callable[[Plan], Any]:
    return lambda plan: check(plan.config)


_engine = _of_machine(doctor.check_engine)

# In the order of the table, which is also that in which the start of a run checks.
CHECKS = (
    Check("python", lambda _: ("ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")),
    Check("settings", _settings, start=_settings, anywhere=True),
    Check("gpus", _gpus, start=_gpus_of_start, anywhere=True),
    Check("run directory", _run_directory, start=_run_directory, of_start=True),
    Check("engine", _engine, start=_engine, of_role="search.engine"),
    Check("packages", _of_machine(doctor.check_packages), start=_need_packages),
    # First of those on the model: it asks the hub for the configuration that the others read.
    Check("model", lambda plan: _model("model.path", plan.config.model.path), anywhere=True, of_role="model.path"),
    Check("explorer", _policy, start=_policy, of_role="search.policy"),
    Check("reference", _teacher, anywhere=True, of_role="reference.path"),
    Check("embedder", _embedder, anywhere=True, of_role="eval.embedder"),
    Check("cuda", _of_machine(doctor.check_cuda)),
    Check("compiler", _of_machine(doctor.check_compiler)),
    Check("caches", _of_machine(doctor.check_caches)),
    Check("topology", _of_machine(doctor.check_topology)),
    Check("disk", lambda plan: doctor.check_disk(plan.config, model_parameters, here=plan.here), anywhere=True),
    Check("weights directory", _of_machine(doctor.check_weights_directory)),
    Check("trainer memory", _memory, anywhere=True),
    Check("buffer address", _of_machine(doctor.check_address)),
    Check("other nodes", _of_machine(doctor.check_other_nodes)),
    Check("endpoint", _of_machine(doctor.check_endpoint)),
    Check("keys", _of_machine(doctor.check_keys)),
    Check("modes", _of_machine(doctor.check_modes)),
    Check("task", _task, start=_need_hub, anywhere=True, of_role="task.name"),
    Check("reward model", _reward_model, anywhere=True, of_role="reward_model.path"),
)
