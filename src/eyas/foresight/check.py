"""What is looked at before a run begins, by itself: the plan and the quick part of the machine's examination."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from eyas.artifact import read_manifest
from eyas.config import RunConfig
from eyas.errors import UserError
from eyas.foresight.calibrate import calibrate, read_calibration
from eyas.foresight.doctor import quick
from eyas.foresight.hardware import here, named
from eyas.foresight.plan import Plan, make_plan, read_speed
from eyas.pipeline import check_against_target
from eyas.target.spec import TargetSpec, read_spec


def planned(config: RunConfig, gpus: str, measure: bool, say: Callable[[str], None]) -> Plan:
    """The plan for the hardware named, or for this machine's; with `measure`, its rates are measured first. Raises UserError."""
    spec = read_spec(Path(config.target.path), need_weights=False)
    check_against_target(config, spec)
    hardware = named(gpus) if gpus else here()
    rates = {} if gpus else read_calibration(config, hardware)
    if measure:
        if gpus:
            raise UserError("--calibrate measures this machine, and --gpus names another. Give one of them.")
        first = make_plan(config, read_spec(Path(config.target.path)), hardware)
        if first.tokens is None:
            return first
        rates = calibrate(config, spec, hardware, first.tokens, say)
    if "disk" not in rates and not gpus and (speed := read_speed(spec)):
        rates = {**rates, "disk": speed}
    return make_plan(config, spec, hardware, rates)


def check_before_run(config: RunConfig, spec: TargetSpec, say: Callable[[str], None], otherwise: str = "", forgiven: tuple[str, ...] = ()) -> None:
    """Raises UserError with the reason for which the run could not end well, and `otherwise`; says what else to know. forgiven: findings that are said and
    stop nothing."""
    prepared = read_manifest(Path(config.run.folder) / "prepare") is not None
    plan = make_plan(config, spec, here())
    if plan.tokens:
        memory = ", ".join(f"{need['need'] / 1e9:,.1f} GB to {name}" for name, need in plan.memory.items())
        features = plan.tokens.tokens * plan.token_bytes / 1e9
        say(f"plan: about {plan.tokens.rows:,} rows, {plan.tokens.tokens:,} tokens, {features:,.2f} GB of features; memory: {memory}")
    findings = [*plan.findings, *quick(config)]
    for finding in findings:
        if finding.level == "warn" or (finding.level == "fail" and finding.name in forgiven):
            say(f"plan: warning: {finding.sentence}")
    forgiven = (*forgiven, "data") if prepared else forgiven
    fails = [finding for finding in findings if finding.level == "fail" and finding.name not in forgiven]
    if fails:
        more = f" ({len(fails) - 1} more; `eyas plan` and `eyas doctor` list them.)" if len(fails) > 1 else ""
        raise UserError(f"The run cannot end well. {fails[0].sentence}{more} {otherwise}".strip())
