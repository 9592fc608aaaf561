"""Candidates in a process of their own, for compute-sanitizer: python tests/gpu/sanitized.py NAME..."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "lib")]

from cases.gpu_candidates import CANDIDATES  # noqa: E402

import gpu_actors as ga  # noqa: E402


def main() -> int:
    chosen = [candidate for candidate in CANDIDATES if candidate.name in sys.argv[1:]]
    # The tools slow kernels so much that the hang check would take them for hung.
    with ga.open_context("cuda", ga.ContextOptions(hang_timeout=600.0, qualify="off")) as context:
        for candidate in chosen:
            asked = candidate.make()
            kernel = context.flash_attn.inspect_key(asked.request).kernel
            asked.check(context.flash_attn.submit(asked.request).result(500), kernel)
            sys.stdout.write(f"right, by {kernel}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
