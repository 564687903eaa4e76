"""Training, prediction and evaluation, and the plans made for them."""

import logging

# peft loads it for every run, and it then logs a line about a CPU kernel for 4-bit products, whatever is trained
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
