"""Bugs to seed into the sums of shared gradients; tests/kernels/test_shared_gradients.py runs them."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["MUTANTS", "SharedMutant"]


class SharedMutant(NamedTuple):
    """A bug. old: text of `file` that is replaced by `new`. probe: what must show it."""

    name: str
    file: str
    old: str
    new: str
    probe: str = "mma kv"


_SUM, _MMA, _FINISH = "backward/backward_sum.cu", "backward/backward_mma.cu", "backward/backward_finish.cu"
_SIMPLE, _PARAMS, _STORE = "backward/backward_simple.cu", "backward/params.cuh", "mma/store.cuh"

MUTANTS = (
    SharedMutant("the first sequence is left out", _SUM, "n = 0; n <", "n = 1; n <"),
    SharedMutant("the last sequence is left out", _SUM, "n < params.batch", "n < params.batch - 1"),
    SharedMutant("the last sequence counts alone", _SUM, "sum += parts", "sum = parts"),
    SharedMutant("sequences lie one element apart", _SUM, "parts[n * params.size]", "parts[n]"),
    SharedMutant("every sequence is the first", _SUM, "parts[n * params.size]", "parts[0]"),
    SharedMutant("the mean and no sum", _SUM, "(Rounded<ELEMENT>(), sum)", "(Rounded<ELEMENT>(), sum / params.batch)"),
    SharedMutant("blocks start one element on", _SUM, "* THREADS + threadIdx.x", "* THREADS + threadIdx.x + 1"),
    SharedMutant("the last block is not bounded", _SUM, "if (place >= params.size) return;", "", "simple"),
    SharedMutant("one element more is left out", _SUM, "place >= params.size", "place >= params.size - 1"),
    SharedMutant("sums are rounded at each step", _SUM, "sum += parts[n * params.size];",
                 "sum = to_real(from_real(Rounded<ELEMENT>(), sum + parts[n * params.size]));", "rounding"),
    SharedMutant("parts are rounded before", _SUM, "sum += parts[n * params.size];",
                 "sum += to_real(from_real(Rounded<ELEMENT>(), parts[n * params.size]));", "rounding"),
    SharedMutant("parts are stored in the inputs' type", _PARAMS, "Choice<SUMMED, Accumulator<ELEMENT>, OUT_ELEMENT>",
                 "OUT_ELEMENT"),
    SharedMutant("dK is stored as dQ is", _MMA, "Gradient<SUMMED_K>", "Gradient<SUMMED_Q>"),
    SharedMutant("dV is stored as dQ is", _MMA, "Gradient<SUMMED_V>", "Gradient<SUMMED_Q>"),
    SharedMutant("dQ is stored as dK is", _FINISH, "Gradient<SUMMED_Q>", "Gradient<SUMMED_K>", "mma q"),
    SharedMutant("every other part is rounded before it is stored", _STORE, "pair{from_real(Rounded<Element>(), low)",
                 "pair{from_real(Rounded<Element>(), to_real(from_real(Rounded<OUT_ELEMENT>(), low)))", "rounding"),
    SharedMutant("CUDA cores round dQ", _SIMPLE, "element_of<Gradient<SUMMED_Q>>", "element_of<float>", "simple"),
    SharedMutant("CUDA cores round dV", _SIMPLE, "element_of<Gradient<SUMMED_V>>", "element_of<half_t>", "simple kv"),
)  # fmt: skip
