"""What tests of other rooms take from inside `testing`."""

from gpu_actors.testing.backward_problems import poison_unseen_backward
from gpu_actors.testing.problems import (
    DTYPES,
    FEATURES,
    HEADS,
    INPUT_KINDS,
    POISON_PAGE,
    SEQLENS,
    PagedCache,
    cast,
    nan_filled,
    paginate,
    poison_tail,
    poison_unseen,
)
