"""Time of a run until its first step and after its last, compared with a script that uses transformers' Trainer.

python benchmarks/start_and_end.py OUT.json [--size tiny|small|card] [--runs 3] [--cases trainer ours ...]

Both load the same model and tokenizer from a folder, read the same rows of text and make three steps; each case runs in
its own process, the cases in turn, `--runs` times. Reported for each: seconds from the start of the process to its
first output, to the end of its first step, from the end of its last step to the end of the process, and total processor
seconds including children. The script ends with a final checkpoint, as the Trainer writes one, and `save_pretrained`,
which is also timed separately. `--size card` trains in bfloat16 on this machine's card.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

SIZES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "small": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8},
    "card": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
}
"""Shapes of 2M, 43M and 0.44B parameters with a vocabulary of 16,000 and an untied head."""
ROWS, STEPS, LENGTH = 4, 3, 128

SETUP = """
import json, random, sys, torch
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
folder, shape, dtype = Path(sys.argv[1]), json.loads(sys.argv[2]), getattr(torch, sys.argv[3])
words = [f"w{number}" for number in range(9000)]
lines = [" ".join(random.Random(row).choices(words, k=80)) for row in range(256)]
(folder / "rows.txt").write_text("\\n".join(lines))
made = Tokenizer(models.BPE(unk_token="<unk>"))
made.pre_tokenizer = pre_tokenizers.ByteLevel()
made.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=16000, special_tokens=["<unk>", "</s>"]))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", pad_token="</s>", unk_token="<unk>")
tokenizer.save_pretrained(folder / "model")
config = LlamaConfig(vocab_size=16000, max_position_embeddings=2048, eos_token_id=1, pad_token_id=1, **shape)
LlamaForCausalLM(config).to(dtype).save_pretrained(folder / "model")
"""
TRAINER = """
import sys, time
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling
from transformers import Trainer, TrainerCallback, TrainingArguments
import datasets
folder, steps, rows, length, kind = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
tokenizer = AutoTokenizer.from_pretrained(f"{folder}/model")
read = datasets.load_dataset("text", data_files=f"{folder}/rows.txt", split="train", cache_dir=f"{folder}/datasets")
read = read.map(lambda batch: tokenizer(batch["text"], truncation=True, max_length=length), batched=True,
    remove_columns=["text"])
model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype="auto")
class Told(TrainerCallback):
    def on_step_end(self, arguments, state, control, **_):
        print(f"step {state.global_step}", file=sys.stderr, flush=True)
arguments = TrainingArguments(f"{folder}/trainer", max_steps=steps, per_device_train_batch_size=rows, report_to=[],
    save_steps=1000, disable_tqdm=True, use_cpu=kind == "cpu", bf16=False, learning_rate=1e-5)
collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
Trainer(model, arguments, train_dataset=read, data_collator=collator, callbacks=[Told()]).train()
began = time.perf_counter()
model.save_pretrained(f"{folder}/trainer/final")
tokenizer.save_pretrained(f"{folder}/trainer/final")
print(f"save_pretrained {time.perf_counter() - began}", file=sys.stderr, flush=True)
"""
CASES = ("trainer", "ours", "ours, plan stored", "ours, searched", "ours, search stored")


def main() -> None:
    """Measure all cases in turn and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dtype = "bfloat16" if asked.size == "card" else "float32"
        shape = json.dumps(SIZES[asked.size])
        subprocess.run([sys.executable, "-c", SETUP, name, shape, dtype], check=True, capture_output=True)
        found: dict[str, list[dict[str, float]]] = {case: [] for case in asked.cases}
        for run in range(asked.runs):
            for case in asked.cases:
                found[case].append(measured(command(case, folder, asked.size, run), folder, run, case))
                print(case, found[case][-1], flush=True)
    document = {
        "what": "seconds from the start of a process to its first step and from its last to its end; medians of runs",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_average": os.getloadavg(),
        "packages": {package: version(package) for package in ("torch", "transformers", "peft", "accelerate")},
        "date": datetime.now(UTC).date().isoformat(),
        "size": asked.size,
        "rows": {case: median(runs) | {"runs": runs} for case, runs in found.items()},
    }
    asked.out.write_text(json.dumps(document, indent=1) + "\n")


def command(case: str, folder: Path, size: str, run: int) -> list[str]:
    """Command line of a case."""
    device = "card" if size == "card" else "cpu"
    if case == "trainer":
        return [sys.executable, "-c", TRAINER, str(folder), str(STEPS), str(ROWS), str(LENGTH), device]
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"training: {{max_steps: {STEPS}, per_device_train_batch_size: {ROWS}, learning_rate: 1e-5, task: pretrain,\n"
        f"  global_batch_size: {ROWS}, optimizer: adamw_torch, mixed_precision_dtype: none, logging_steps: 1}}\n"
        f"model: {{model_name: {folder}/model, torch_dtype_str: {'bfloat16' if device == 'card' else 'float32'},\n"
        f"  model_max_length: {LENGTH}}}\ndata: {{train: [{{path: {folder}/rows.txt}}]}}\n"
    )
    typed = ["-m", "framework", "train", str(recipe), f"training.output_dir={folder}/{case.replace(', ', '_')}_{run}"]
    typed += ["gpu=cpu"] if device == "cpu" else []
    typed += ["training=fastest"] if "search" in case else []
    return [sys.executable, *typed]


def measured(typed: list[str], folder: Path, run: int, case: str) -> dict[str, float]:
    """Times of a process, from its messages on stderr."""
    cache = folder / f"cache_{run}_{'search' in case}"  # empty where nothing is stored
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": paths}
    began = time.perf_counter()
    process = subprocess.Popen(typed, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    lines: list[tuple[float, str]] = []
    assert process.stderr is not None
    reading = threading.Thread(
        target=lambda: lines.extend((time.perf_counter() - began, line) for line in process.stderr or ())
    )
    reading.start()
    _, status, use = os.wait4(process.pid, 0)
    ended = time.perf_counter() - began
    reading.join()
    if status:
        raise SystemExit("".join(line for _, line in lines[-30:]))
    steps = [at for at, line in lines if re.match(r"step \d", line)]
    alone = [float(line.split()[1]) for _, line in lines if line.startswith("save_pretrained ")]
    found = {"first_sign": lines[0][0], "first_step": steps[0], "end": ended - steps[-1]}
    found |= {"save_pretrained": alone[0]} if alone else {}
    return {name: round(value, 2) for name, value in {**found, "cpu": use.ru_utime + use.ru_stime}.items()}


def median(runs: list[dict[str, float]]) -> dict[str, Any]:
    """The median of each figure."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


if __name__ == "__main__":
    main()
