"""Agreement between ranks before and during training: config, run folder, inputs and seeds."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from framework.build.data.packing import Packs
from framework.build.data.rows import Rows
from framework.build.ranks import Ranks
from framework.errors import Problem, RequestError, VerificationFailed
from framework.run.inputs import Inputs, rows_checksum
from framework.run.planning.fit import decide_or_refuse
from framework.run.ranks.coordinator import Coordinator
from framework.run.record.run_folder import RunFolder, fallback_of, open_folder
from framework.run.state import seed_all
from framework.schema.config import TrainingConfig
from framework.schema.keys import left_open
from framework.schema.plural import counted


def decided_by_main(coordinator: Coordinator, config: TrainingConfig) -> tuple[TrainingConfig, Sequence[str]]:
    """The config with `auto` decided by the main rank, and lines that explain the decisions. Raises DoesNotFit."""
    if not left_open(config):
        return config, ()
    reasons: list[str] = []

    def decide() -> str:
        decided = decide_or_refuse(config)
        reasons.extend(decided.reasons)
        return decided.config.model_dump_json()

    with coordinator.phase("deciding what is auto"):
        return TrainingConfig.model_validate_json(coordinator.shared("decided", decide)), reasons


def find_folder(
    coordinator: Coordinator, config: TrainingConfig, name: str, resume: bool, overwrite: bool
) -> RunFolder:
    """The run folder chosen by the main rank; the others only read there.

    Raises RequestError as `open_folder` does, and if a resuming rank does not see the main one's folder.
    """
    if coordinator.ranks.world == 1:
        return open_folder(config, name, resume, overwrite)
    chosen = Path(
        coordinator.shared("folder", lambda: str(open_folder(config, name, resume, overwrite).path.absolute()))
    )
    if resume and not chosen.exists():
        message = f"rank {coordinator.ranks.rank} does not see {chosen}, from which rank 0 resumes"
        raise RequestError([Problem("training.output_dir", message, expected="a folder that all machines share")])
    return RunFolder(chosen, coordinator.ranks.is_main, fallback_of(config, chosen))


def digest(inputs: Inputs, steps: int) -> str:
    """Digest of the rows, token by token, and the number of steps, which must be equal on every rank."""
    parts = [counted(steps, "step")]
    for name, rows in (("training", inputs.data.train), ("evaluation", inputs.data.eval)):
        if rows is not None:
            plain = rows.rows if isinstance(rows, Packs) else rows
            summed = f"{rows_checksum(plain):08x}" if isinstance(plain, Rows) else "?"
            parts.append(f"{counted(len(rows), 'row')} for {name} (tokens {summed})")
    return ", ".join(parts)


def agree(coordinator: Coordinator, text: str) -> None:
    """Raise VerificationFailed on every rank if their texts differ, since batches would then differ."""
    texts = coordinator.gathered("digests", text)
    if len(set(texts)) > 1:
        listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
        raise VerificationFailed(f"the ranks did not read the same: {listed}. Do they see the same files?")


def seed_each_rank(seed: int, ranks: Ranks) -> None:
    """Give each data-parallel rank its own random state, for dropout, after the model was built from the same seed on
    all. Ranks with the same rows keep a common state; the first one's is that of a single process."""
    number = ranks.rank // ranks.same_rows
    if number or ranks.same_rows > 1:
        seed_all(int(np.random.SeedSequence([seed, number]).generate_state(1)[0]))
