"""Finding the trained model of a run or folder. Loads no torch to say where it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from framework.build.model_folder import read_object, require_readable
from framework.compose import load_of_run
from framework.compose.trained_folders import trusted_keys, untrusted
from framework.errors import Problem, RequestError
from framework.paths import path_like
from framework.run.record.layout import FINAL, MERGED, UNFINISHED
from framework.run.record.overwrite import ENVIRONMENT
from framework.schema.config import TrainingConfig
from framework.schema.rules.model import remote_code, remote_code_conflicts
from framework.schema.tasks import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ADAPTER_FILE, CONFIG_FILE, MODEL_FILE = "adapter_config.json", "config.yaml", "config.json"
ADAPTER_WEIGHTS, PICKLED_WEIGHTS = "adapter_model.safetensors", "adapter_model.bin"
TRUST = "--trust-remote-code"
PROMPTS = ("PREFIX_TUNING", "PROMPT_TUNING")
"""peft's names of adapters made of virtual tokens before the row."""


@dataclass(frozen=True)
class SavedModel:
    """Folder of a trained model or adapter, and the config of its run if known."""

    folder: Path
    config: TrainingConfig | None
    trusts_code: bool = False
    """Whether Python code of the model or its base may run."""
    allows_other_base: bool = False
    """Whether an adapter may be applied to another base than it was trained on."""

    @property
    def adapter_kind(self) -> str | None:
        """peft's name for the kind of adapter; None for a plain model."""
        file = self.folder / ADAPTER_FILE
        return str(read_object(file, "RUN").get("peft_type", "")) if file.exists() else None

    @property
    def task(self) -> Task:
        """Task that it was trained for, from the run's config, else from the model's files."""
        if self.config is not None:
            return self.config.training.task
        if self.adapter_kind is not None:
            kind = read_object(self.folder / ADAPTER_FILE, "RUN").get("task_type")
            return Task.CLASSIFICATION if kind == "SEQ_CLS" else Task.SFT
        settings = read_object(self.folder / MODEL_FILE, "RUN")
        classes = settings.get("architectures")
        if not isinstance(classes, list) or not any(
            str(name).endswith("ForSequenceClassification") for name in classes
        ):
            return Task.SFT
        if settings.get("problem_type") != "regression":
            return Task.CLASSIFICATION
        named = settings.get("id2label")
        names = tuple(named.values()) if isinstance(named, dict) else ()
        return Task.REWARD if names == Task.REWARD.facts.outputs else Task.REGRESSION

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """Load the tokenizer saved with it. Raises RequestError."""
        from framework.build.text.tokenizer import read_tokenizer_of

        return read_tokenizer_of(self.folder, "RUN", self.trusts_code)


def find_saved_model(source: Path, trusts_code: bool = False, allow: Sequence[str] = ()) -> SavedModel:
    """Find the model in a run folder, or in a folder with a model or an adapter. `allow` may name `model.base`.

    Raises RequestError describing the folder if there is none, naming every damaged file, and if the run's model comes
    with code that is not trusted.
    """
    if allow:
        from framework.build.loading.bases import BASE  # loads torch

        if wrong := [word for word in allow if word != BASE]:
            raise RequestError([Problem("--allow", f"{word} may not differ here", None, BASE) for word in wrong])
    for folder in (source / FINAL, source):
        if (folder / ADAPTER_FILE).exists() or (folder / MODEL_FILE).exists():
            require_readable(folder, "RUN")
            return SavedModel(folder, _config_of(folder, trusts_code), trusts_code, bool(allow))
    if (source / CONFIG_FILE).exists():
        message = f"{source} is a run that has not finished: it has no {FINAL}/"
        raise RequestError([Problem("RUN", message, expected=f"tunesmith train {source / CONFIG_FILE} --resume")])
    what = "has neither a model nor a run in it" if source.is_dir() else "is not a folder"
    expected = f"a run folder, or one with {MODEL_FILE} or {ADAPTER_FILE}"
    nearest = None if source.is_dir() else path_like(source, Path.is_dir)
    raise RequestError([Problem("RUN", f"{source} {what}", expected=expected, nearest=nearest)])


def code_that_runs(source: Path) -> list[str]:
    """Sentences naming the Python code that a trusted model of a run or folder would run. Raises RequestError."""
    saved_model = find_saved_model(source, trusts_code=True)
    if saved_model.config is None:
        return [remote_code(str(saved_model.folder), None)]
    return [conflict.message for conflict in remote_code_conflicts(saved_model.config)]


def _config_of(folder: Path, trusts_code: bool) -> TrainingConfig | None:
    """Config of the run that an export or merged folder belongs to. A config above any other folder does not count."""
    whole = folder.absolute()
    written = whole.parent / CONFIG_FILE
    is_export = whole.name in (FINAL, MERGED) or whole.name.startswith(UNFINISHED)
    is_of_run = is_export and (whole.parent / ENVIRONMENT).exists()
    if not is_of_run or not written.exists():
        return None
    config = load_of_run(written)
    if not trusts_code and (keys := trusted_keys(config)):
        expected = f"{TRUST}, if you trust the code that comes with {config.model.model_name}"
        raise RequestError([untrusted(key, str(written), expected) for key in keys])
    return config
