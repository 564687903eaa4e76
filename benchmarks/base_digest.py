"""Duration of the digest of a frozen base, for a checkpoint of the size of Llama 3.1 70B.

    python benchmarks/base_digest.py FOLDER [OUT.json]

Sparse files of zeros with the 723 tensors of the 70B in bfloat16 (141 GB) are created in FOLDER, read once and deleted.
The counts of reads and bytes hold for any disk; the seconds are those of reading holes without a disk access: a real
disk adds the time of its random reads.
"""

import json
import math
import os
import platform
import shutil
import struct
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from framework.build.loading import bases

LAYERS, HIDDEN, KEY_VALUE, INNER, WORDS = 80, 8192, 1024, 28672, 128256
FILES = 30


def shapes() -> dict[str, list[int]]:
    """The tensors of Llama 3.1 70B."""
    found = {f"{name}.weight": [WORDS, HIDDEN] for name in ("model.embed_tokens", "lm_head")}
    found["model.norm.weight"] = [HIDDEN]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        found |= {f"{at}.{norm}_layernorm.weight": [HIDDEN] for norm in ("input", "post_attention")}
        found |= {f"{at}.self_attn.{name}_proj.weight": [HIDDEN, HIDDEN] for name in "qo"}
        found |= {f"{at}.self_attn.{name}_proj.weight": [KEY_VALUE, HIDDEN] for name in "kv"}
        found |= {f"{at}.mlp.{name}_proj.weight": [INNER, HIDDEN] for name in ("gate", "up")}
        found[f"{at}.mlp.down_proj.weight"] = [HIDDEN, INNER]
    return found


def write_sparse(file: Path, tensors: dict[str, list[int]]) -> int:
    """Write a safetensors file whose values are holes. Returns its bytes."""
    header, end = dict[str, object](), 0
    for name, shape in tensors.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", len(text)) + text)
        opened.truncate(8 + len(text) + end)
    return file.stat().st_size


def main() -> None:
    """Measure, print and write."""
    folder = Path(sys.argv[1]) / "base_digest"
    out = Path(sys.argv[2] if len(sys.argv) > 2 else Path(__file__).parent / "results" / "base_digest_cpu.json")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tensors = shapes()
    names = list(tensors)
    files = [folder / f"model-{number:05d}.safetensors" for number in range(FILES)]
    total = sum(
        write_sparse(file, {name: tensors[name] for name in names[number::FILES]}) for number, file in enumerate(files)
    )
    seconds = []
    for _ in range(3):
        began, used = time.perf_counter(), time.process_time()
        bases.weights_digest(files)
        seconds.append([round(time.perf_counter() - began, 3), round(time.process_time() - used, 3)])
    blocks = [[size for _, size in bases._blocks(2 * math.prod(shape), whole=False)] for shape in tensors.values()]
    shutil.rmtree(folder)
    document = {
        "what": "weights_digest of the tensors of Llama 3.1 70B in 30 sparse safetensors files",
        "bytes": total,
        "tensors": len(tensors),
        "reads": sum(map(len, blocks)),
        "bytes_read": sum(map(sum, blocks)),
        "wall_and_cpu_seconds": seconds,
        "load_average": round(os.getloadavg()[0], 1),
        "cpu": f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}",
        "python": platform.python_version(),
        "safetensors": version("safetensors"),
        "date": datetime.now(UTC).date().isoformat(),
    }
    print(json.dumps(document, indent=2))
    out.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
