"""`python -m tunesmith` is `python -m framework`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("framework", run_name="__main__", alter_sys=True)
