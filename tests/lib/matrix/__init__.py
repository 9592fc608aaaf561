"""Problems that are hard for a kernel family: a module a family.

A module has ``KERNELS``, whose sources its rows run, and two kinds of rows:

- ``ROWS``, each a problem and named by what is hard in it; ``RARE`` are those that only the sweep runs. ``run`` runs
  one.
- ``GRID``, compiled variants with an option, dtype, architecture and head dim of their own; ``USUAL`` are those that
  the default run samples. ``run_variant`` runs shapes of one, many of them if ``thorough``.

Both raise AssertionError or EmulationFault where a kernel errs. `mutation.kernels` seeds bugs into the sources and runs
the rows.
"""
