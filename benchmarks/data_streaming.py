"""Host memory of a stream: a gigabyte of JSONL, read, tokenized and batched for one epoch.

python benchmarks/data_streaming.py OUT.json [--megabytes 1000] [--length 512] [--folder /tmp]

The rows are the sources of Python's standard library in pieces of about 2000 characters, repeated. The tokenizer is
trained on them. Resident memory is read before the stream is opened and after each step.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from framework.build.data.prepare import prepare_data, training_texts
from framework.build.data.streamed_batches import StreamedBatches
from framework.build.sources.python_library import standard_library
from framework.build.text.tokenizer import build_tokenizer
from framework.schema.config import TrainingConfig

PIECE = 2000
"""Characters per row."""


def write_rows(file: Path, size: int) -> int:
    """Write about `size` bytes of JSONL. Returns the number of rows."""
    texts = [str(record["text"]) for _, records in standard_library() for _, record in records]
    pieces = [text[start : start + PIECE] for text in texts for start in range(0, len(text), PIECE)]
    written, rows = 0, 0
    with file.open("w") as out:
        while written < size:
            row = json.dumps({"id": rows, "text": pieces[rows % len(pieces)]}) + "\n"
            out.write(row)
            written, rows = written + len(row), rows + 1
    return rows


def measure(file: Path, length: int) -> dict[str, Any]:
    """One epoch of the file in steps of 32 rows."""
    config = TrainingConfig.model_validate(
        {
            "training": {"task": "pretrain", "max_steps": 1, "per_device_train_batch_size": 32},
            "model": {"model_max_length": length, "tokenizer": {"train": "bpe", "vocab_size": 8192}},
            "data": {"train": [{"path": str(file)}], "streaming": True},
        }
    )
    process = psutil.Process()
    tokenizer = build_tokenizer(config, training_texts(config))
    before = most = process.memory_info().rss
    started, first = time.perf_counter(), 0.0
    data = prepare_data(config, tokenizer)
    assert data.stream is not None
    batches = StreamedBatches(data.stream, config.batch, pad_token_id=0)
    steps = tokens = 0
    for made in batches.start(0):
        first = first or time.perf_counter() - started
        if batches.epochs(steps + 1):
            break
        steps += 1
        tokens += sum(batch["input_ids"].numel() for batch in made)
        most = max(most, process.memory_info().rss)
    seconds = time.perf_counter() - started
    report = batches.progress.account.report
    assert report is not None
    return {
        "extra_resident_bytes": most - before,
        "resident_bytes_before": before,
        "seconds": round(seconds, 1),
        "seconds_to_first_step": round(first, 2),
        "rows": report.read,
        "steps": steps,
        "positions_per_second": round(tokens / seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        file = Path(folder) / "rows.jsonl"
        rows = write_rows(file, asked.megabytes * 10**6)
        size = file.stat().st_size
        found = measure(file, asked.length)
    document = {
        "what": "one epoch of streamed JSONL, tokenised and made into steps of 32 rows, without training",
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, shared with other work",
        "python": platform.python_version(),
        "packages": {name: version(name) for name in ("torch", "transformers", "tokenizers", "datasets", "pyarrow")},
        "date": datetime.now(UTC).date().isoformat(),
        "file_bytes": size,
        "file_rows": rows,
        "shuffle_buffer": 1000,
        "model_max_length": asked.length,
        **found,
    }
    asked.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
