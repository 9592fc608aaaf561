"""Backward problems with data, drawn from a seed: a forward problem, its results and the gradient of its output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_actors.reference import attention_forward
from gpu_actors.reference.tolerance import round_inputs
from gpu_actors.testing.problems import FEATURES, Array, ForwardCase, cast, random_forward

__all__ = ["BACKWARD_FEATURES", "BackwardCase", "random_backward"]

BACKWARD_FEATURES = tuple(feature for feature in FEATURES if feature != "descales")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardCase:
    """A backward problem and its data.

    forward: q, k, v, options and lengths.
    dout: (batch, rows, heads, dim_v), or (total, heads, dim_v) for varlen, in the dtype of q.
    out, lse: the oracle's, rounded to that dtype and to float32, as a forward kernel gives them.
    repro: the call that rebuilds the case.
    """

    forward: ForwardCase
    dout: Array
    out: Array
    lse: Array
    repro: str

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments that `reference.attention_backward` and `FlashAttnActor.backward` both take."""
        return self.forward.options

    @property
    def arguments(self) -> tuple[Array, Array, Array, Array]:
        """(dout, q, k, v), as the oracle and `reference.gradient_tolerance` take them."""
        return (self.dout, *self.forward.inputs)

    @property
    def inputs(self) -> tuple[Array, Array, Array, Array, Array, Array]:
        """(dout, q, k, v, out, lse), as `FlashAttnActor.backward` takes them."""
        return (*self.arguments, self.out, self.lse)


def random_backward(seed: int, *, compute: str | None = None, **choices: Any) -> BackwardCase:
    """A problem and its data. The seed decides all that the arguments do not.

    compute: "f16", "bf16" or "tf32" for float32 operands whose forward was multiplied in it: of out and lse alone.
    choices: arguments of `random_forward`. features are `BACKWARD_FEATURES` by default.
    """
    forward = random_forward(seed, **{"features": BACKWARD_FEATURES, **choices})
    dtype = forward.q.dtype.name
    shape = (*forward.q.shape[:-1], forward.v.shape[-1])
    # dout has its own random stream, so that it does not change what `random_forward` draws.
    dout = np.random.default_rng((seed, 1)).standard_normal(shape)
    inputs = forward.inputs if compute is None else round_inputs(*forward.inputs, compute)
    result = attention_forward(*inputs, **forward.options)
    chosen = choices if compute is None else {"compute": compute, **choices}
    arguments = (f"{name}={value!r}" for name, value in chosen.items())
    return BackwardCase(
        forward=forward,
        dout=cast(dout, dtype),
        out=cast(result.out, dtype),
        lse=result.lse.astype(np.float32),
        repro=f"random_backward({', '.join([str(seed), *arguments])})",
    )
