"""What each lever would save in each phase of a run, by rehearsing the run with that lever moved. Loads no torch.

A saving is only worth a figure when it is a rehearsal's: shrinking one term moves the peak to another moment, which the
terms at the old peak cannot tell. A rehearsal takes a tenth of a second (a tiny model) to some ten seconds (8B), and
there are about a dozen to make; so they are made when memory has run out, the most promising first. What is not done in
time has no figure, rather than an estimate.
"""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from framework.compose import load_of_run
from framework.compose.trained_folders import trusted_keys
from framework.errors import TunesmithError
from framework.memory.explain.moves import HOST
from framework.memory.explain.proposals import Proposal, propose
from framework.memory.explain.saved_plan import PLAN, SavedPlan
from framework.memory.ledger import Plan
from framework.memory.requirements import is_installed
from framework.regular_files import read_regular
from framework.run.planning.plan_pool import PROCESSES, Rehearsals
from framework.schema.config import TrainingConfig

MOST_SECONDS = 60.0
"""How long a run that has failed, or who asks why, waits for them."""


def lever_savings(config: TrainingConfig, plan: Plan) -> list[dict[str, Any]]:
    """The `levers` of `plan.json`, for a resolved config and its plan: each with what it saves, None where that is not
    known after MOST_SECONDS."""
    proposals = sorted(propose(config), key=lambda proposal: -_promise(proposal, plan))
    entries = [_entry(proposal) for proposal in proposals]
    end = time.monotonic() + MOST_SECONDS
    with suppress(TunesmithError, OSError), Rehearsals() as rehearsals:  # the host's memory may be full, too
        for at in range(0, len(proposals), PROCESSES):
            if time.monotonic() > end:
                break
            made = rehearsals([proposal.config for proposal in proposals[at : at + PROCESSES]])
            for entry, other in zip(entries[at:], made, strict=False):
                entry["saves"] = _savings(plan, other) if other is not None else {}
    return entries


def savings_of_run(folder: Path) -> SavedPlan | None:
    """The plan of a run's folder with what each lever would have saved, found out now.

    None where that cannot be: the plan or the config cannot be read, torch is not installed, or the model has code of
    its own, which a run's file gives no leave to run.
    """
    if not is_installed("torch"):
        return None
    try:
        plan = Plan.from_json(json.loads(read_regular(folder / PLAN)))
        config = load_of_run(folder / "config.yaml")
    except (TunesmithError, OSError, ValueError, KeyError, TypeError):
        return None
    if trusted_keys(config):
        return None
    return SavedPlan.model_validate({**plan.to_json(), "levers": lever_savings(config, plan)})


def _entry(proposal: Proposal) -> dict[str, Any]:
    words = {"key": proposal.key, "override": proposal.override, "costs": proposal.costs, "exact": proposal.exact}
    return {**words, "saves": None}


def _savings(plan: Plan, other: Plan) -> Mapping[str, int]:
    """Bytes that a change takes off the allocated peak of each phase, and off the host.

    Allocated, not reserved: what is reserved and unused goes back to the driver before memory runs out. Negative where
    the change takes more.
    """
    after = {phase.name: phase.allocated_bytes for phase in other.phases}
    saved = {phase.name: phase.allocated_bytes - after.get(phase.name, 0) for phase in plan.phases}
    return {**saved, HOST: plan.host_bytes - other.host_bytes}


def _promise(proposal: Proposal, plan: Plan) -> int:
    """The bytes at the step's peak that a lever could shrink at best."""
    terms = plan.step_peak.terms.to_json()
    return sum(terms[name] for name in proposal.shrinks)
