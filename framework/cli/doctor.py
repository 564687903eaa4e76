"""`doctor`: describe and measure this machine."""

import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from framework.cli.arguments import Json
from framework.cli.printing import (
    as_document,
    check_writable,
    exit_code,
    print_columns,
    print_json,
    print_text,
    written,
)
from framework.errors import Problem, RequestError
from framework.installation import versions


def doctor(
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Measure this machine. With a card the result is a preset for `gpu=FILE`, without one a section "
            "`gpu.host` for a recipe.",
        ),
    ] = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Plan and measure a few steps on this machine's card, with a line for an issue."
        ),
    ] = False,
    output: Annotated[Path | None, typer.Option("--output", help="File for the preset, a .yaml.")] = None,
    as_json: Json = False,
) -> int:
    """Describe this machine: Python, torch, CUDA, cards, packages, and which memory settings it cannot have."""
    if calibrate and compare:
        raise RequestError([Problem("--compare", "cannot be combined with --calibrate")])
    if calibrate:
        return _calibrate(output, as_json)
    if output is not None:
        raise RequestError([Problem("--output", "has no effect without --calibrate")])
    if compare:
        return _compare(as_json)

    facts = describe()
    if as_json:
        print_json(facts)
    else:
        print_columns([(key, str(value)) for key, value in facts.items() if not isinstance(value, dict)])
        print_columns([(f"  {name}", str(version or "not installed")) for name, version in facts["packages"].items()])
        print_text("settings that this machine does not support, and their requirements:")
        print_columns([(f"  {setting}", needs) for setting, needs in facts["unusable_settings"].items()])
    return 0


def _calibrate(output: Path | None, as_json: bool) -> int:
    if output is not None:
        if output.suffix not in (".yaml", ".yml"):
            raise RequestError(
                [Problem("--output", f"{output} is not a YAML file", expected="a name that ends in .yaml")]
            )
        check_writable(output, "--output")
    from framework.run.planning.measurements import Measurements  # the schema, which --help does without

    with Measurements() as measured:  # it loads its libraries while this process does
        from framework.run.planning.calibrate import calibrate, calibrate_host, has_card, section, to_card

        if has_card():
            card = to_card(calibrate(measured))
        else:
            measured.wait()  # torch may not support a card that the driver lists
            card = calibrate_host()
    text = section(card, "Measured by `tunesmith doctor --calibrate`: a preset, gpu=FILE.")
    if "capacity_bytes" not in card:
        text = section(card, "Measured by `tunesmith doctor --calibrate`, without a card: a section for a recipe.")
    missed = written(output, "--output", lambda: text)
    if as_json:
        print_json({"gpu": card, **as_document(missed)})
    elif output is not None and not missed and "capacity_bytes" not in card:
        print_text(f"wrote {output}; no card: add its section to a recipe")
    elif output is not None and not missed:
        print_text(f"wrote {output}; use it as gpu=./{output}" if not output.is_absolute() else f"wrote {output}")
    else:
        print_text(text, end="")
    return exit_code(missed, 0)


def _compare(as_json: bool) -> int:
    from framework.run.planning.measurements import Measurements

    with Measurements() as measured:
        from framework.run.planning.measure import compare, summary

        name, rows = compare(measured)
    if as_json:
        print_json({"card": name, "rows": [asdict(row) for row in rows], "summary": summary(rows, name)})
        return 0
    print_columns([("step", "allocated", "used", "seconds"), *(row.cells() for row in rows)])
    print_text("\nerror of planned against measured; this line is for an issue:\n" + summary(rows, name))
    return 0


PACKAGES = (
    "accelerate",
    "bitsandbytes",
    "comet_ml",
    "datasets",
    "flash-attn",
    "gguf",
    "hydra-core",
    "liger-kernel",
    "mlflow",
    "omegaconf",
    "peft",
    "pydantic",
    "safetensors",
    "swanlab",
    "tensorboard",
    "torch",
    "torchao",
    "trackio",
    "transformers",
    "triton",
    "wandb",
)
"""Packages that a recipe can need."""


def describe() -> dict[str, Any]:
    """Python, processors, torch, CUDA, cards, package versions (None: not installed), and lever settings that this
    machine does not support. Loads torch."""
    import torch

    from framework.memory.cards import detect, read_card
    from framework.memory.requirements import unusable_settings
    from framework.schema.gpu import GPUParams

    cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cards": [f"{card.name}, {card.total_memory} bytes, capability {card.major}.{card.minor}" for card in cards],
        "preset": detect() or "cpu",
        "packages": versions(PACKAGES),
        "unusable_settings": unusable_settings(GPUParams.model_validate(read_card(detect() or "cpu"))),
    }
