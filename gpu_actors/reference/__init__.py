"""The NumPy oracle: attention as the formulas state it, in float64, on every option of the contract.

It is what every kernel is tested against and what the mock device answers with. One way through it:
`arguments` cuts a checked problem and its arrays into pieces that fit in cache, `softmax` turns a piece's scores into
weights of the keys that each row sees, `forward` puts them together and `backward` takes them apart again.
`low_precision` is the same formula with every step rounded to the input dtype, the yardstick of the rule that
`tolerance` and `gradient_tolerance` state.
`paged` gathers what lies in pages and caches.
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
