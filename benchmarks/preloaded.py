"""What the server that `rows.py` forks from has imported. Raises RuntimeError where that has started CUDA."""

import sys

import torch
import transformers.models.bert.modeling_bert
import transformers.models.gemma2.modeling_gemma2
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama
import transformers.models.modernbert.modeling_modernbert
import transformers.models.qwen3.modeling_qwen3
import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401

import framework.run.planning.measure
import framework.run.rehearsal.rehearse  # noqa: F401

if torch.cuda.is_initialized() or "bitsandbytes" in sys.modules:
    raise RuntimeError("CUDA has started, or bitsandbytes may have: forked processes could not use it")
