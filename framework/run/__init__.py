"""Room 4: making it happen."""

import logging

# peft loads it for every run, and it then tells of a CPU kernel for 4-bit products, whatever is trained
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
