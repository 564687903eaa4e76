"""Faults at random: kills, full disks, damaged files, fuzzed inputs. A small sample runs with the quick tests.

`FAULTS=long` makes it the long run; `FAULTS_SEED` is the seed of everything that is drawn.
"""
