"""Bugs to seed into forward_sm90; `mutation.hopper` runs them.

Those of its numbers are in `hopper_number_mutants`, those of its options in `hopper_option_mutants`.
"""

from __future__ import annotations

from mutation.forward_mutants import Mutant
from mutation.hopper_number_mutants import NUMBERS
from mutation.hopper_option_mutants import OPTIONS

__all__ = ["DEFECTS", "MUTANTS"]


def _bug(name: str, file: str, old: str, new: str, *probes: str) -> Mutant:
    file = "hopper/forward_sm90.cu" if file == "forward" else f"hopper/{file}.cuh"
    return Mutant(name, "forward_sm90", file, old, new, probes or ("plain",))


# Of those that the barriers and waits are there against; the default test run seeds these.
DEFECTS = (
    _bug("the softmax does not wait for S", "forward", "  ptx::wgmma_wait<1>();\n", ""),
    _bug(
        "V is released before its product is done",
        "forward",
        (
            "  ptx::wgmma_wait<0>();\n"
            "  ptx::pin_registers(r.o);\n"
            "  ptx::pin_registers(r.p);\n"
            "  release_values();\n"
            "  pack"
        ),
        "  release_values();\n  ptx::wgmma_wait<0>();\n  pack",
    ),
    _bug("the output leaves unfenced", "store", "  ptx::fence_proxy_async();\n  sync_consumer", "  sync_consumer"),
    _bug(
        "values behind a sequence are multiplied",
        "consumer",
        "if (OTHERS_FOLLOW && !FP8) clear_values_past",
        "if (0) clear_values_past",
        "neighbours",
    ),
    _bug(
        "the diagonal starts at key 0",
        "schedule",
        "make_mask(params, work.seqlen_q, seqlen_k, ",
        "make_mask(params, seqlen_k, seqlen_k, ",
        "causal",
    ),
)

PIPELINE = (
    _bug(
        "K is released before its product is done",
        "forward",
        "  ptx::wgmma_wait<1>();\n  ptx::pin_registers(r.s);\n  release_keys();",
        "  release_keys();\n  ptx::wgmma_wait<1>();\n  ptx::pin_registers(r.s);",
    ),
    _bug(
        "P is packed before O is done",
        "forward",
        (
            "  ptx::wgmma_wait<0>();\n"
            "  ptx::pin_registers(r.o);\n"
            "  ptx::pin_registers(r.p);\n"
            "  release_values();\n"
            "  pack(r.p, r.s);"
        ),
        "  pack(r.p, r.s);\n  ptx::wgmma_wait<0>();\n  release_values();",
    ),
    _bug(
        "O is rescaled before it is done",
        "forward",
        "  if (more) wait_for_keys();\n  ptx::wgmma_wait<0>();",
        "  rescale(r.o, r.correction);\n  if (more) wait_for_keys();\n  ptx::wgmma_wait<0>();",
    ),
    _bug("the next keys are not waited for", "forward", "  if (more) wait_for_keys();\n", ""),
    _bug(
        "the second keys are not waited for",
        "consumer",
        "    if (!VALUES_FIRST && work.tile_before(last) >= 0) wait_for_keys();\n",
        "",
    ),
    _bug(
        "values are not waited for",
        "forward",
        "  wait_for_values();\n  ptx::wgmma_fence();  //",
        "  ptx::wgmma_fence();  //",
    ),
    _bug(
        "the last values are not waited for",
        "consumer",
        "    wait_for_values();\n    ptx::pin_registers(r.o);",
        "    ptx::pin_registers(r.o);",
    ),
    _bug("Q is not waited for", "consumer", "    ptx::mbarrier_wait(shared.q_full(number), q_parity);\n", ""),
    _bug("Q's parity never turns", "consumer", "    q_parity ^= 1;\n", ""),
    _bug(
        "Q is released while it is read",
        "forward",
        "  first_scores(r, work, rows);\n",
        "  first_scores(r, work, rows);\n  release(shared.q_empty(number));\n",
    ),
    _bug("a ring's parity never turns", "boxes", "      parity ^= 1;\n", ""),
    _bug("the producer does not wait for a free stage", "producer", "    ptx::mbarrier_wait(empty, parity);\n", ""),
    _bug(
        "the producer does not wait for a free Q",
        "producer",
        "      ptx::mbarrier_wait(shared.q_empty(consumer), q_parity);\n",
        "",
    ),
    _bug(
        "lanes of the producer drift a phase apart",
        "producer",
        "    __syncwarp();\n    if (!leader) return;",
        "    if (!leader) return;",
    ),
    _bug("half the bytes are announced", "producer", "(full, Tile::BYTES)", "(full, Tile::BYTES / 2)"),
    _bug(
        "K and V change places",
        "forward",
        "load_keys(work, next);\n    load_values(work, n);",
        "load_keys(work, next);\n    load_values(work, next);",
    ),
    _bug(
        "no fence before PV, after the early rescale",
        "forward",
        "  ptx::wgmma_fence();  // without it, ptxas puts one in (C7519)\n",
        "",
        "wide",
    ),
    _bug(
        "no fence before QK",
        "forward",
        "  ptx::pin_registers(r.p);\n  ptx::wgmma_fence();\n  multiply_keys(r.s);",
        "  ptx::pin_registers(r.p);\n  multiply_keys(r.s);",
    ),
    _bug("a consumer passes the turn to itself", "forward", "number + 1 == CONSUMERS ? 0 : number + 1", "number"),
    _bug("the turn is not passed on", "forward", "  if (PINGPONG) pingpong_pass();\n\n", "\n", "causal", "plain"),
    _bug(
        "no warpgroup has the first turn",
        "forward",
        "  if (PINGPONG && number == CONSUMERS - 1) pingpong_pass();\n",
        "",
        "causal",
    ),
    _bug(
        "the last turn stays",
        "forward",
        ("  if (PINGPONG && number == 0) pingpong_wait();  // passed on by the last one; no other waits\n"),
        "",
        "causal",
    ),
    _bug("barriers are not fenced", "forward", "  ptx::fence_mbarrier_init();\n", ""),
    _bug("an empty barrier takes one consumer", "forward", "READERS = 4 * CONSUMERS", "READERS = 4"),
)

SCHEDULE = (
    _bug("the counter is not put back", "schedule", "if (drawn == schedule.tiles - 1) *schedule.counter = 0;", ""),
    _bug(
        "a tile is left out",
        "schedule",
        "static_cast<int>(gridDim.x) + ptx::warp_uniform(drawn)",
        "static_cast<int>(gridDim.x) + 1 + ptx::warp_uniform(drawn)",
    ),
    _bug(
        "a slot is overwritten",
        "schedule",
        "    ptx::mbarrier_wait(shared.tile_empty(slot.stage), slot.parity);\n",
        "",
        "empty",
    ),
    _bug(
        "a slot is read early",
        "schedule",
        "    ptx::mbarrier_wait(shared.tile_full(slot.stage), slot.parity);\n",
        "",
    ),
    _bug(
        "a slot is never given back",
        "schedule",
        "    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(shared.tile_empty(slot.stage));\n",
        "",
        "batch",
    ),
    _bug(
        "the last section is as long as the others",
        "schedule",
        "first_head + schedule.section_heads > schedule.all_heads",
        "false",
        "sections",
    ),
    _bug(
        "every head has a KV head of its own",
        "schedule",
        "divide(work.head, schedule.head_group)",
        "work.head % params.heads_kv",
        "batch",
    ),
    _bug(
        "heads of all sequences are the first's",
        "schedule",
        "work.sequence = divide(sequence_head, schedule.heads)",
        "work.sequence = 0",
        "batch",
    ),
    _bug("rows past the maximum are left out", "schedule", "    if (!VARLEN) break;\n", "    break;\n", "long"),
    _bug(
        "packed keys start with the queries",
        "schedule",
        "work.k_start = params.cu_seqlens_k[work.sequence]",
        "work.k_start = params.cu_seqlens_q[work.sequence]",
        "varlen",
    ),
)

OUTPUT = (
    _bug(
        "O's place is overwritten while it leaves",
        "store",
        "    if (threadIdx.x % WARPGROUP == 0) ptx::bulk_wait_read<0>();\n    sync_consumer(consumer);\n",
        "",
    ),
    _bug(
        "one thread fences for all",
        "store",
        "  ptx::fence_proxy_async();\n  sync_consumer",
        "  if (thread == 0) ptx::fence_proxy_async();\n  sync_consumer",
    ),
    _bug(
        "the output leaves before all have written it",
        "store",
        "  ptx::fence_proxy_async();\n  sync_consumer(consumer);\n",
        "  ptx::fence_proxy_async();\n",
    ),
    _bug("a block ends before its stores", "forward", "  if (threadIdx.x % WARPGROUP == 0) ptx::bulk_wait<0>();\n", ""),
    _bug(
        "Q is overwritten before its last product",
        "forward",
        "  mainloop(r, work, rows);\n  release(shared.q_empty(number));\n",
        "  release(shared.q_empty(number));\n  mainloop(r, work, rows);\n",
        "direct",
    ),
    _bug("each lane sends what it keeps", "store", "odd ? first : second, 1)", "odd ? second : first, 1)", "direct"),
    _bug(
        "words go to the other pair of lanes", "store", "odd ? first : second, 1)", "odd ? first : second, 2)", "direct"
    ),
    _bug("words lie in the order of their arrival", "store", "high = odd ? second : got", "high = got", "direct"),
    _bug("a lane stores its own words alone", "store", "low = odd ? got : first", "low = first", "direct"),
    _bug("both pairs of a quad store the same columns", "store", " + 8 * odd + 4 * upper);", " + 8 * odd);", "direct"),
    _bug(
        "neighbouring eights change places", "store", " + 8 * odd + 4 * upper);", " + 8 * !odd + 4 * upper);", "direct"
    ),
    _bug("the stores stop at the first columns", "store", "(out + 8 * n)", "(out + 8 * (n % 4))", "direct"),
    _bug("the second row is stored over the first", "store", "row = rows.row(half);", "row = rows.row(0);", "direct"),
    _bug(
        "the second row has the first one's factor",
        "store",
        "o, n, half, factor[half]",
        "o, n, half, factor[0]",
        "direct",
    ),
    _bug(
        "the first row's columns are stored twice", "store", "o, n + 1, half, factor", "o, n + 1, 0, factor", "direct"
    ),
    _bug(
        "rows past the end are stored from registers",
        "store",
        "if (row < work.seqlen_q && 8 * (n + odd) < HEAD_DIM_V) *",
        "if (8 * (n + odd) < HEAD_DIM_V) *",
        "direct varlen",
    ),
    _bug(
        "columns past the head dim are stored from registers",
        "store",
        "if (row < work.seqlen_q && 8 * (n + odd) < HEAD_DIM_V) *",
        "if (row < work.seqlen_q) *",
        "direct narrow",
    ),
    _bug(
        "NaN of hidden keys spreads in registers",
        "store",
        "    mend_nonfinite(all, work, rows, results, o, scale, 0);\n",
        "",
        "direct nonfinite",
    ),
    _bug(
        "a mended row is stored 8 rows off",
        "nonfinite",
        "store_unit(params, work, row, unit, words)",
        "store_unit(params, work, row + 8, unit, words)",
        "direct nonfinite",
    ),
    _bug(
        "rows of the next sequence are overwritten",
        "output",
        "if (row >= work.seqlen_q || 8 * unit >= HEAD_DIM_V) return;",
        "if (8 * unit >= HEAD_DIM_V) return;",
        "varlen",
    ),
    _bug("rows without keys are not written", "forward", "    store_nothing(all.params, work, number);\n", "", "few"),
    _bug("the LSE lacks the sum", "store", "rows.row(0), results[0]);", "rows.row(0), {0.0f, results[0].factor});"),
    _bug(
        "NaN of hidden keys spreads",
        "store",
        "  mend_nonfinite(all, work, rows, results, o, scale, shared.o(consumer));\n",
        "",
        "nonfinite",
    ),
    _bug(
        "mended rows see all keys", "nonfinite", "      if (!work.mask.visible(row, key)) continue;\n", "", "nonfinite"
    ),
    _bug(
        "a lane's share is the whole product",
        "nonfinite",
        "return dot + __shfl_xor_sync(quad, dot, 2)",
        "return dot",
        "nonfinite",
    ),
    _bug(
        "a mended row lies 8 rows off",
        "nonfinite",
        "(row - work.row_begin) % ROWS",
        "(row - work.row_begin + 8) % ROWS",
        "nonfinite",
    ),
    _bug(
        "rows are mended before other lanes have put them there",
        "nonfinite",
        "  __syncwarp();  // other lanes wrote these rows, and what is written later stays\n",
        "",
        "nonfinite",
    ),
    _bug("mended rows are not divided", "nonfinite", "ptx::rcp(nonfinite.result.sum) * ", "", "nonfinite"),
    _bug("mended rows stop at the first columns", "nonfinite", "- lane_id() % 4 < UNITS", "< 4", "nonfinite"),
)

MUTANTS = (*DEFECTS, *PIPELINE, *SCHEDULE, *OUTPUT, *NUMBERS, *OPTIONS)
