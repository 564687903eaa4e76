"""Objectives of `classification` and `regression`: one output per row against its `targets`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from framework.build.losses.loss import Batch, Observe, model_inputs
from framework.build.model.parts import causal_model
from framework.build.text.labels import IGNORED
from framework.errors import Problem, RequestError

AddedUp = Mapping[str, Tensor]

LEAST_VARIANCE = 1e-13
"""Share of the mean square below which a variance is taken for rounding: float32 targets and outputs have a relative
precision of 6e-8, squared 4e-15, and sums of 1e3 rows in float64 have errors of that size."""


def row_answers(model: nn.Module, batch: Batch) -> Tensor:
    """The model's outputs, float32 of shape (rows, outputs)."""
    answers: Tensor = model(**model_inputs(model, batch), use_cache=False).logits
    return answers.float()


def rows_that_count(batch: Batch) -> Tensor:
    """Rows with targets, bool of shape (rows,). Rows of a dummy batch have NaN."""
    return ~batch["targets"].isnan().any(1)


@dataclass(frozen=True)
class _OfRows(ABC):
    """A loss over row outputs, summed over the rows that count."""

    names: tuple[str, ...]
    """Names of the outputs."""

    def __call__(self, model: nn.Module, batch: Batch, observe: Observe) -> Tensor:
        answers = row_answers(model, batch)
        observe("loss")
        return self._loss(answers, batch)

    @property
    def unit(self) -> str:
        return "rows"

    def terms(self, batch: Batch) -> Tensor:
        return rows_that_count(batch).sum()

    @abstractmethod
    def _loss(self, answers: Tensor, batch: Batch) -> Tensor: ...


@dataclass(frozen=True)
class OneClass(_OfRows):
    """Cross entropy of one class per row; targets are (rows, 1) class indices."""

    smoothing: float = 0.0
    """Label smoothing in training; evaluation has none."""

    def _loss(self, answers: Tensor, batch: Batch) -> Tensor:
        share = self.smoothing
        return F.cross_entropy(answers, _classes(batch), ignore_index=IGNORED, reduction="sum", label_smoothing=share)

    def sums(self, model: nn.Module, batch: Batch) -> AddedUp:
        answers, truth = row_answers(model, batch), _classes(batch)
        counted = rows_that_count(batch)
        loss = F.cross_entropy(answers, truth, ignore_index=IGNORED, reduction="sum")
        truth, guess = truth.clamp(min=0), answers.argmax(1)
        return {
            "loss": loss,
            "terms": counted.sum(),
            "true": _per_class(truth, counted, answers),
            "guessed": _per_class(guess, counted, answers),
            "right": _per_class(truth, counted & (guess == truth), answers),
        }

    def metrics(self, sums: AddedUp) -> dict[str, float]:
        right = float(sums["right"].sum() / sums["terms"])
        return {**_mean_loss(sums), "accuracy": right, "macro_f1": macro_f1(*_counts(sums))}


@dataclass(frozen=True)
class SeveralClasses(_OfRows):
    """Binary cross entropy, mean over the classes; targets are (rows, classes) of 0 and 1."""

    def sums(self, model: nn.Module, batch: Batch) -> AddedUp:
        answers, counted = row_answers(model, batch), rows_that_count(batch)
        truth, guess = batch["targets"].nan_to_num() > 0.5, answers > 0
        truth, guess = truth & counted[:, None], guess & counted[:, None]
        return {
            "loss": self._loss(answers, batch),
            "terms": counted.sum(),
            "exact": ((truth == guess).all(1) & counted).sum(),
            "true": truth.sum(0),
            "guessed": guess.sum(0),
            "right": (truth & guess).sum(0),
        }

    def metrics(self, sums: AddedUp) -> dict[str, float]:
        true, guessed, right = _counts(sums)
        each = f1(true, guessed, right)
        return {
            **_mean_loss(sums),
            "accuracy": float(sums["exact"] / sums["terms"]),
            "micro_f1": float(f1(true.sum(), guessed.sum(), right.sum())),
            "macro_f1": macro_f1(true, guessed, right),
            **{f"f1.{name}": float(value) for name, value in zip(self.names, each, strict=True)},
        }

    def _loss(self, answers: Tensor, batch: Batch) -> Tensor:
        targets = batch["targets"].nan_to_num()  # before the loss: a NaN would reach the gradient despite the mask
        losses = F.binary_cross_entropy_with_logits(answers, targets, reduction="none").mean(1)
        return (losses * rows_that_count(batch)).sum()


@dataclass(frozen=True)
class Numbers(_OfRows):
    """Squared error, mean over the values of a row; targets are (rows, values)."""

    def sums(self, model: nn.Module, batch: Batch) -> AddedUp:
        answers, counted = row_answers(model, batch), rows_that_count(batch)
        guess = torch.where(counted[:, None], answers, 0).double()
        truth = batch["targets"].nan_to_num().double()
        return {
            "loss": self._loss(answers, batch),
            "terms": counted.sum(),
            "error": (guess - truth).square().sum(0),
            "distance": (guess - truth).abs().sum(0),
            "truth": truth.sum(0),
            "truth_squared": truth.square().sum(0),
            "guess": guess.sum(0),
            "guess_squared": guess.square().sum(0),
            "product": (truth * guess).sum(0),
        }

    def metrics(self, sums: AddedUp) -> dict[str, float]:
        """Metrics, as means over several values. r2 and pearson are 0 if the targets do not vary."""
        rows = sums["terms"]
        varies = _variation(sums["truth"], sums["truth_squared"], rows)
        guess_varies = _variation(sums["guess"], sums["guess_squared"], rows)
        together = sums["product"] - sums["truth"] * sums["guess"] / rows
        r2 = torch.where(varies > 0, 1 - sums["error"] / varies, 0)
        pearson = together / (varies * guess_varies).clamp(min=0).sqrt()
        return {
            **_mean_loss(sums),
            "mse": float((sums["error"] / rows).mean()),
            "mae": float((sums["distance"] / rows).mean()),
            "r2": float(r2.mean()),
            "pearson": float(torch.where(pearson.isfinite(), pearson, 0).mean()),
        }

    def _loss(self, answers: Tensor, batch: Batch) -> Tensor:
        errors = (answers - batch["targets"].nan_to_num()).square().mean(1)
        return (errors * rows_that_count(batch)).sum()


def build_row_objective(model: nn.Module, smoothing: float) -> OneClass | SeveralClasses | Numbers:
    """The objective for the model's head. Raises RequestError for label smoothing with several classes per row."""
    config = causal_model(model).config
    names = tuple(config.id2label[index] for index in range(config.num_labels))
    if config.problem_type == "regression":
        return Numbers(names)
    if config.problem_type != "multi_label_classification":
        return OneClass(names, smoothing)
    if smoothing:
        message = "needs exactly one class per row, and these rows may have any number"
        raise RequestError([Problem("training.label_smoothing", message, expected="0, or data.multi_label: false")])
    return SeveralClasses(names)


def f1(true: Tensor, guessed: Tensor, right: Tensor) -> Tensor:
    """F1 from counts of true, predicted and correctly predicted rows; 0 if all are 0."""
    return 2 * right / (true + guessed).clamp(min=1)


def macro_f1(true: Tensor, guessed: Tensor, right: Tensor) -> float:
    """Mean F1 over the classes that occur in targets or predictions."""
    occurs = (true + guessed) > 0
    return float((f1(true, guessed, right) * occurs).sum() / occurs.sum().clamp(min=1))


def _variation(total: Tensor, squared: Tensor, rows: Tensor) -> Tensor:
    """Sum of squared deviations from the mean; 0 if it is only rounding."""
    found = squared - total**2 / rows
    return torch.where(found > LEAST_VARIANCE * squared, found, 0)


def _classes(batch: Batch) -> Tensor:
    """Class index of each row, int64 of shape (rows,), IGNORED for rows that do not count."""
    return batch["targets"].nan_to_num(nan=IGNORED)[:, 0].long()


def _per_class(classes: Tensor, counted: Tensor, answers: Tensor) -> Tensor:
    """Number of counted rows per class; float32, exact below 2^24 rows a batch."""
    return answers.new_zeros(answers.shape[1]).index_add(0, classes, counted.float())


def _counts(sums: AddedUp) -> tuple[Tensor, Tensor, Tensor]:
    return sums["true"], sums["guessed"], sums["right"]


def _mean_loss(sums: AddedUp) -> dict[str, float]:
    return {"eval_loss": float(sums["loss"] / sums["terms"])}
