"""The NumPy oracle: attention as the formulas state it, in float64, with every option of a request.

Every kernel is tested against it, and the mock device answers with its results. A call runs as follows:
`arguments` cuts a checked problem and its arrays into pieces that fit in cache, `softmax` turns a piece's scores into
weights of the keys that each row sees, `forward` computes the output from them and `backward` the gradients.
`low_precision` is the same formula with every step rounded to the input dtype. The rule of `tolerance` and
`gradient_tolerance` measures errors by it.
`paged` gathers keys and values from pages and caches.
"""

from __future__ import annotations

from gpu_actors.reference.arguments import AttentionOptions, ForwardOptions
from gpu_actors.reference.backward import ReferenceGradients, attention_backward
from gpu_actors.reference.forward import ReferenceOutput, attention_forward, visible_keys
from gpu_actors.reference.low_precision import attention_backward_low, attention_forward_low
from gpu_actors.reference.paged import Gathered, gather_cache, gather_caches, gather_pages, paged_attention_forward

__all__ = [
    "AttentionOptions",
    "ForwardOptions",
    "Gathered",
    "ReferenceGradients",
    "ReferenceOutput",
    "attention_backward",
    "attention_backward_low",
    "attention_forward",
    "attention_forward_low",
    "gather_cache",
    "gather_caches",
    "gather_pages",
    "paged_attention_forward",
    "visible_keys",
]
