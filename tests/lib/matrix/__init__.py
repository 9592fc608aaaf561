"""Problems that are hard for a kernel family: a module for each family.

A module has ``KERNELS``, whose sources its rows run, and two kinds of rows:

- ``ROWS``, each a problem, named by what is hard in it; only the sweep runs those in ``RARE``. ``run`` runs one.
- ``GRID``, compiled variants with an option, dtype, architecture and head dim of their own; the default run samples
  those in ``USUAL``. ``run_variant`` runs shapes of one, many of them if ``thorough``.

Both raise AssertionError or EmulationFault if a kernel errs. `mutation.kernels` seeds bugs into the sources and runs
the rows.
"""
