"""Speed of reading and tokenizing rows, compared with `datasets.map` with the same fast tokenizer.

python benchmarks/data_speed.py OUT.json [--megabytes 8] [--repeats 5]

Ours is everything from the file to rows for batches: read, check, render, tokenize, find supervised tokens, truncate,
count. Theirs is `load_dataset("json")` and one `map` that calls the tokenizer, for chats on the rendering of
`apply_chat_template`. Each runs in one process, with the tokenizer's threads and without. Texts are pieces of Python's
standard library, chats its functions and their docstrings, with one question and answer or four in a row. The
tokenizer is trained on the texts.

The processor times of both are compared (the minimum of alternating repeats), as the machine runs other work as well.
"""

import argparse
import ast
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets

from framework.build.data.prepare import prepare_data
from framework.build.sources.python_library import standard_library
from framework.build.text.named_templates import read_template
from framework.build.text.tokenizer import train_tokenizer
from framework.schema.config import TrainingConfig

PIECE = 2000
"""Characters per text."""


def texts() -> Iterator[dict[str, Any]]:
    """The standard library in pieces, over and over."""
    sources = [str(record["text"]) for _, records in standard_library() for _, record in records]
    while True:
        for source in sources:
            yield from ({"text": source[start : start + PIECE]} for start in range(0, len(source), PIECE))


def chats(turns: int) -> Iterator[dict[str, Any]]:
    """Questions about functions, answered by their docstrings, `turns` of them in a chat, over and over."""
    pairs = [
        (f"What does `{node.name}` in {path} do?\n\n{ast.unparse(node.args)}", ast.get_docstring(node) or "")
        for path, records in standard_library()
        for _, record in records
        for node in ast.walk(_parsed(str(record["text"])))
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node)
    ]
    while True:
        for start in range(0, len(pairs) - turns, turns):
            messages = [
                {"role": role, "content": content}
                for pair in pairs[start : start + turns]
                for role, content in zip(("user", "assistant"), pair, strict=True)
            ]
            yield {"messages": messages}


def _parsed(source: str) -> ast.AST:
    try:
        return ast.parse(source)
    except SyntaxError:
        return ast.Module([], [])


def write_rows(file: Path, rows: Iterator[dict[str, Any]], size: int) -> int:
    """Write about `size` bytes of JSONL. Returns the number of rows."""
    written = count = 0
    with file.open("w") as out:
        while written < size:
            line = json.dumps(next(rows)) + "\n"
            out.write(line)
            written, count = written + len(line), count + 1
    return count


def measure(file: Path, tokenizer: Any, repeats: int) -> dict[str, float]:
    """Processor seconds of both, and their ratio."""
    config = TrainingConfig.model_validate(
        {
            "training": {"task": "sft", "max_steps": 1},
            "model": {"model_max_length": 8192},
            "data": {"train": [{"path": str(file)}], "cache": False},
        }
    )

    def ours() -> None:
        prepare_data(config, tokenizer, len(tokenizer))

    def theirs() -> None:
        rows = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=str(fresh()))
        rows.map(tokenised, batched=True, remove_columns=rows.column_names)

    def tokenised(batch: dict[str, list[Any]]) -> Any:
        if "text" in batch:
            return tokenizer(batch["text"])
        rendered = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in batch["messages"]]
        return tokenizer(rendered, add_special_tokens=False)

    def fresh() -> Path:
        return Path(tempfile.mkdtemp(dir=file.parent))

    both: list[tuple[float, float]] = [(seconds(ours), seconds(theirs)) for _ in range(repeats)]
    own, other = (min(each) for each in zip(*both, strict=True))
    return {"ours_seconds": round(own, 3), "map_seconds": round(other, 3), "ratio": round(own / other, 3)}


def seconds(work: Callable[[], None]) -> float:
    """Processor time of this process, all threads."""
    started = time.process_time()
    work()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--megabytes", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    datasets.disable_progress_bars()
    found: dict[str, Any] = {}
    tokenizer = train_tokenizer((row["text"] for row in texts()), 8192)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = read_template("chatml")
    kinds = {"texts": texts(), "chats of 1 turn": chats(1), "chats of 4 turns": chats(4)}
    with tempfile.TemporaryDirectory() as folder:
        for number, (kind, rows) in enumerate(kinds.items()):
            file = Path(folder) / f"{number}.jsonl"
            count = write_rows(file, rows, asked.megabytes * 10**6)
            found[kind] = {"rows": count, "bytes": file.stat().st_size}
            for threads in ("false", "true"):
                os.environ["TOKENIZERS_PARALLELISM"] = threads
                name = "with tokenizer threads" if threads == "true" else "without"
                found[kind][name] = measure(file, tokenizer, asked.repeats)
                print(kind, name, found[kind][name])
    document = {
        "what": "processor time to read and tokenise rows, ours over `datasets.map` with the tokenizer alone",
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, shared with other work",
        "python": platform.python_version(),
        "packages": {name: version(name) for name in ("torch", "transformers", "tokenizers", "datasets", "pyarrow")},
        "date": datetime.now(UTC).date().isoformat(),
        "rows": found,
    }
    asked.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
