"""Faults to seed into what several workers share; workers.py runs them."""

from __future__ import annotations

from collections.abc import Mapping

from mutation.forward_mutants import Mutant
from mutation.packed_mask_mutants import PACKED_MASKS
from mutation.packing_mutants import PACKING

__all__ = ["MUTANTS", "PROBES"]

PROBES: Mapping[str, tuple[str, ...]] = {
    "moves": ("tests/distributed/test_moving.py", "tests/kv/test_kv_cache_moving.py"),
    "rows": ("tests/distributed/test_context_split.py",),
    "heads": ("tests/distributed/test_head_split.py",),
    "keys": ("tests/distributed/test_key_split.py", "tests/distributed/test_sharded_cache.py"),
    "shard rows": ("tests/distributed/test_shard_rows.py",),
    "padded": ("tests/planning/test_padded_batches.py",),
    "bias": ("tests/planning/test_packed_bias.py",),
    "one batch": ("tests/planning/test_one_batch.py",),
    "shared gradients": ("tests/kernels/test_shared_gradients.py",),
    "cached bias": ("tests/kv/test_cached_bias.py", "tests/planning/test_signatures.py"),
    "latent": ("tests/kv/test_kv_cache_latent.py",),
    "few rows": ("tests/kernels/test_packing.py", "tests/planning/test_few_rows.py"),
    "masks": ("tests/planning/test_block_mask_requests.py", "tests/planning/test_signatures.py"),
    "masked pages": ("tests/kernels/test_paged_block_masks.py", "tests/planning/test_signatures.py"),
    "masked kernels": ("tests/kernels/test_packed_block_masks.py::test_dropout_keeps_its_seed",),
    "apart": ("tests/kv/test_rows_apart.py", "tests/planning/test_signatures.py"),
}


def _faults(file: str, probe: str, *faults: tuple[str, str, str]) -> list[Mutant]:
    """faults: name, old text, new text."""
    module = file.rpartition("/")[2]
    return [Mutant(name, module, f"gpu_actors/{file}.py", old, new, (probe,)) for name, old, new in faults]


# Batches that are packed by seqused_q and seqused_k.
PADDED: tuple[Mutant, ...] = (
    *_faults(
        "planning/padded",
        "padded",
        ("rows of padding see the next keys", "_ends(keys, none, spare_keys)", "_ends(keys, spare_keys, none)"),
        ("keys of padding are the sequence's", "_ends(keys, none, spare_keys)", "_ends(keys + spare_keys, none, none)"),
        ("rows of padding are the sequence's", "_ends(rows, spare_rows, none)", "_ends(rows + spare_rows, none, none)"),
        ("sequences end where the first does", "used.astype(np.int64)", "np.full_like(used, used[0], np.int64)"),
        ("rows are cut by the keys", '_used("seqused_q", request.seqused_q,', '_used("seqused_q", request.seqused_k,'),
        (
            "slopes are those of other sequences",
            "np.repeat(array, _PARTS, axis=0)",
            "np.tile(array, (_PARTS, 1))[:, :]",
        ),
        ("padding has positions of its sequence", "[part::_PARTS] = (0, 1)", "[part::_PARTS] += (0, 0)"),
        ("a sequence has positions of padding", "for part in range(1, _PARTS)", "for part in range(_PARTS)"),
        ("one position has a step of 0", "np.ones_like(changes[name])", "np.zeros_like(changes[name])"),
        ("sinks read dout of padding", 'for name, kept in (("dout", counts[:, None, None]), (', "for name, kept in (("),
        ("sinks lose dout of the last row", "< rows[:, None])", "< rows[:, None] - 1)"),
        ("the lse is of another head", "lse.transpose(1, 0, 2).reshape(heads", "lse.reshape(heads"),
        (
            "the lse is not turned back",
            '["lse"] = lse.transpose(1, 0, 2)',
            '["lse"] = lse.reshape(batch, -1, lengths["out"])',
        ),
        ("an output with gaps is a copy", "and not (writes and not follows)", ""),
        (
            "gaps on a device are passed over",
            "batch <= 1 or length <= 1 or outer == length * row\n    if",
            "True\n    if",
        ),
        ("one row too many counts", "most <= length, field", "most <= length + 1, field"),
        ("packed batches may be padded", "ends is None or given is None, field", "True, field"),
        ("sequences have the bias of others", "and len(dense.bias) > 1:", "and False:"),
        ("gradients of a bias are those of padding", "batch, _PARTS)[:, 0]", "batch, _PARTS)[:, 1]"),
        ("gradients of a bias are those of packed ones", "and len(dbias) > 1:", "and False:"),
        ("gradients of a bias are not summed", "and len(dbias) > 1:", "and len(dbias) == 1:"),
    ),
)

# Operands of one sequence that stand for all.
ONE_BATCH: tuple[Mutant, ...] = (
    *_faults(
        "planning/forward",
        "one batch",
        ("one stands for itself", "len(batches) != 2 or", "True or"),
        (
            "rows never stand for others",
            'for name in ("q", "k", "v")}\n    batches',
            'for name in ("k", "v")}\n    batches',
        ),
        ("the least batch counts", "batch = max(batches)", "batch = min(batches)"),
        ("all are taken for one", "if shape[:1] == (1,)}", "}"),
        ("operands are copied", "return np.broadcast_to(array, shape)", "return np.repeat(array, batch, axis=0)"),
        ("sequences lie behind each other", "strides=(0, *array.strides[1:])", "strides=array.strides"),
        ("a device has one sequence", "array, shape=shape, strides=(0", "array, strides=(0"),
    ),
    *_faults(
        "actors/flash_attn",
        "one batch",
        ("an actor takes whole batches", "request = broadcast_batch(request)", "pass"),
    ),
    *_faults(
        "planning/forward",
        "shared gradients",
        (
            "padded sequences share operands",
            "    if is_padded(request):\n        reason",
            "    if False:\n        reason",
        ),
        ("one operand alone is summed", 'summed="".join(narrow))', "summed=next(iter(narrow)))"),
        ("nothing is summed", 'summed="".join(narrow))', 'summed="")'),
        ("backward repeats operands", "if not isinstance(request, FlashBackward):", "if True:"),
    ),
    *_faults(
        "planning/backward",
        "shared gradients",
        ("plans know nothing of sums", "        summed_of(request),\n", ""),
        ("sums are as long as the batch", "(1, *array.shape[1:]) if", "tuple(array.shape) if"),
        ("the oracle takes the first sequence", ".sum(axis=0, keepdims=True)", "[:1]"),
        ("the oracle takes the mean", ".sum(axis=0, keepdims=True)", ".mean(axis=0, keepdims=True)"),
    ),
    *_faults(
        "kernels/backward/shared",
        "shared gradients",
        (
            "parts are of 16 bits",
            'return "float64" if problem.dtype == "float64" else "float32"',
            "return problem.dtype",
        ),
        ("one block adds", "blocks = -(-math.prod(shape) // SUM_THREADS)", "blocks = 1"),
        ("the last elements are not added", "-(-math.prod(shape) // SUM_THREADS)", "math.prod(shape) // SUM_THREADS"),
        ("half of the sequences are added", '"batch": batch}', '"batch": batch // 2}'),
        ("v has rows of q's dim", "p.heads_kv, p.head_dim_v)", "p.heads_kv, p.head_dim)"),
    ),
    *_faults(
        "kernels/backward/params",
        "shared gradients",
        ("sums are written to at once", "        if name in problem.summed:\n", "        if False:\n"),
    ),
    *_faults(
        "planning/explanation",
        "one batch",
        ("keys are of whole batches", "adopted = broadcast_batch(adopt_request(", "adopted = (adopt_request("),
    ),
)

# Biases and masks of packed sequences.
BIAS: tuple[Mutant, ...] = (
    *_faults(
        "reference/softmax",
        "bias",
        (
            "the oracle reads past a sequence's keys",
            ", : piece.seqlen_q, : piece.seqlen_k]",
            ", : piece.seqlen_q, -piece.seqlen_k :]",
        ),
        ("the oracle reads another sequence's", "piece.batched(bias)", "piece.batched(bias[::-1])"),
    ),
    *_faults(
        "reference/backward",
        "bias",
        ("gradients lie at the end of a row", "rows[..., : piece.seqlen_k]", "rows[..., -piece.seqlen_k :]"),
    ),
    *_faults(
        "reference/arguments",
        "bias",
        ("no bias is wider than the longest", "max(least[1], own[1])", "least[1]"),
        ("no bias is longer than the longest", "max(least[0], own[0])", "least[0]"),
    ),
    *_faults(
        "validation/forward",
        "bias",
        ("no room is left for rows", "max(seqlen_q, int(bias[2]))", "seqlen_q"),
        ("no room is left for keys", "max(seqlen_k, int(bias[3]))", "seqlen_k"),
    ),
    *_faults(
        "kernels/support",
        "bias",
        ("sequences of a packed batch take turns", 'p.layout == "varlen" or ', ""),
        ("none takes turns", "p.bias and p.bias[1] and own_tiles", "own_tiles"),
    ),
    *_faults(
        "kernels/backward/launch",
        "bias",
        ("turns that are never taken", "return bias_turns_refusal(problem)", "return None"),
    ),
    *_faults(
        "validation/paged",
        "cached bias",
        ("a bias may end before the keys", "problem.bias_keys >= longest_one", "True"),
        ("a bias is one key short", "problem.bias_keys >= longest_one", "problem.bias_keys + 1 >= longest_one"),
        ("lengths on the device are not feared", "longest_one = problem.seqlen_k", "longest_one = 0"),
        ("a bias has all keys there are", '"bias_keys": keys}', '"bias_keys": 0}'),
        ("one row has an axis of rows", "one_row=isinstance(request, BatchedDecode)", "one_row=False"),
    ),
    *_faults(
        "planning/cached",
        "cached bias",
        ("a launch has no bias", '"q_positions", "k_positions", "bias")', '"q_positions", "k_positions")'),
        ("the bias of one row has no axis of rows", "request.bias[:, :, None]", "request.bias"),
    ),
    *_faults(
        "actors/kv_store",
        "cached bias",
        (
            "rows that wait are not counted",
            "(0 if rows is None else rows.counts)\n            check_bias",
            "0\n            check_bias",
        ),
        (
            "a launch may outgrow its bias",
            "check_bias(work.plan.problem, dataclasses",
            "dataclasses.replace(work.request); (dataclasses",
        ),
    ),
    *_faults(
        "kernels/hopper_decode/launch",
        "cached bias",
        ("wgmma takes a bias", '"cache_leftpad", "bias")', '"cache_leftpad")'),
    ),
    *_faults(
        "kernels/hopper_backward/variant",
        "bias",
        ("turns that are never taken", "bias_turns_refusal(problem) or ", ""),
    ),
)

# Rows of q that are rotated apart from new rows.
APART: tuple[Mutant, ...] = (
    *_faults(
        "planning/append_rows",
        "apart",
        (
            "q is rotated as the new rows",
            "(self.turned, self.turned_positions) if of_q else",
            "(self.counts, self.positions) if of_q else",
        ),
        ("q is rotated twice", "self.rope is not None and self.turned is None else 0", "self.rope is not None else 0"),
        ("every row of q is a sequence's own", "            rows=self.turned_rows,\n", "            rows=1,\n"),
        (
            "positions of q are those of new rows",
            "positions=self.turned_positions is not None",
            "positions=self.positions is not None",
        ),
        (
            "launches share rows of other counts",
            "        apart = self.turned is not None, self.turned_rows\n",
            "        apart = None\n",
        ),
        (
            "new rows are cut by q's ends",
            '    elif message.cu_seqlens_k_new is not None:\n        ends_field = "cu_seqlens_k_new"\n',
            "",
        ),
        ("dense new rows are cut by q's ends", '    if ends_field == "cu_seqlens_q" and len(', "    if False and len("),
        (
            "positions of q are passed over",
            "    if given is None and np.array_equal(counts, rows.counts):",
            "    if np.array_equal(counts, rows.counts):",
        ),
        (
            "positions of q need no rope",
            '        expect(given is None, "positions_q", None if',
            '        expect(True, "positions_q", None if',
        ),
        (
            "positions of q may be of any length",
            '    optional_array("positions_q", given, ((int(counts.sum()),),), ("int32",))\n',
            "",
        ),
        (
            "tables may be too short for q",
            '("positions_q", self.turned, self.turned_positions)]',
            '("positions_q", None, None)]',
        ),
        (
            "new rows stand where q does",
            '    if rows.turned is not None:\n        reason = "must be given where',
            '    if False:\n        reason = "must be given where',
        ),
    ),
    *_faults(
        "actors/kv_launch",
        "apart",
        (
            "q is cut by the new rows' ends",
            '        inputs["cu_seqlens_new"] = rows.ends',
            '        inputs["cu_seqlens_q"] = rows.ends',
        ),
        (
            "the oracle rotates q as the new rows",
            "        if rows.turned is not None:\n            angles",
            "        if False:\n            angles",
        ),
        (
            "the kernel rotates q as many rows as are new",
            "zip(appends, problems, (",
            "zip(appends, problems[:1] * len(problems), (",
        ),
        ("attention reads q as it came", "any(problem.heads_q for problem in problems)", "problems[0].heads_q > 0"),
        ("the rotation of q writes keys", "(total,)), 0, dim)", "(total,)), 1, dim)"),
    ),
    *_faults(
        "actors/kv_cache",
        "apart",
        ("nothing new, and nothing is rotated", "            elif rows.turned is None:\n", "            else:\n"),
        ("q is never rotated apart", "            turn_apart(rows, message, request.q)\n", ""),
    ),
)

# Caches of latents.
LATENT: tuple[Mutant, ...] = (
    *_faults(
        "kernels/append/params",
        "latent",
        ("rotated keys overwrite the latent", '("k_cache", problem.head_dim_v,', '("k_cache", 0,'),
        ("columns are counted as bytes", "first * ITEMSIZES[cache.dtype]", "first"),
        ("latents are quantised without a factor", '["v_descale"] = buffers["k_descale"]', '["v"] = buffers["v"]'),
    ),
    *_faults(
        "kernels/append/copy_pages",
        "latent",
        ("a copy has no rotated keys", 'rows * pool.sides["k"]', "rows * pool.head_dim_v"),
    ),
    *_faults(
        "kernels/append/variant",
        "latent",
        ("rows are wider than attention reads", '["k"] > LATENT_DIM', '["k"] > 2 * LATENT_DIM'),
        ("a refusal names no field of the cache", '"latent_dim" if problem.latent else "head_dim_v"', '"head_dim_v"'),
    ),
    *_faults(
        "actors/kv_launch",
        "latent",
        (
            "the oracle exchanges the columns",
            "pool.head_dim_v :], caches[0][..., : pool.head_dim_v]",
            "pool.head_dim :], caches[0][..., : pool.head_dim]",
        ),
        ("the oracle quantises latents without a factor", '"k_descale" if pool.latent else "v_descale"', '"v_descale"'),
    ),
    *_faults(
        "actors/kv_store",
        "latent",
        (
            "values are as many columns as are rotated",
            "latent_dim=self.pool.head_dim_v if",
            "latent_dim=self.pool.head_dim if",
        ),
        ("the parts exchange their sizes", "dim, dim_v = dim - latent, latent", "dim, dim_v = latent, dim - latent"),
        ("nothing need be rotated", "spec.latent_dim, 0, dim - 1)", "spec.latent_dim, 0, dim)"),
        (
            "values are said twice",
            'expect(spec.head_dim_v is None, "head_dim_v"',
            'expect(True, "head_dim_v"',
        ),
        (
            "values have a factor that is not read",
            'expect(factors is None, "v_descale"',
            'expect(True, "v_descale"',
        ),
    ),
    *_faults(
        "actors/kv_cache",
        "latent",
        ("q is rotated in its first columns", "None and cache.pool.latent:", "None and False:"),
        ("a refused dtype is k's", '"k_pe" if problem.latent else "k"', '"k"'),
    ),
    *_faults(
        "actors/kv_moving",
        "latent",
        ("known pages come again", "[one[first:] for one", "[one[: len(one) - first] for one"),
    ),
    *_faults(
        "planning/append_rows",
        "latent",
        ("the parts change places", '("k_pe", "c_kv")', '("c_kv", "k_pe")'),
        ("rows of another cache are passed over", "    for name in others:\n", "    for name in ():\n"),
    ),
    *_faults(
        "kv/transfer",
        "latent",
        ("pages do not say that they are latents", "latent = pool.head_dim_v if pool.latent else 0", "latent = 0"),
        ("values beside latents are passed over", "not pool.latent or given.v is None", "True"),
    ),
    *_faults(
        "kv_cache",
        "latent",
        ("q_pe goes before q", 'beside(("q", "q_pe"), q, q_pe)', 'beside(("q", "q_pe"), q_pe, q)'),
        ("q_pe is joined for any cache", "expect(bool(self._spec.latent_dim),", "expect(True,"),
        ("a cache forgets its latents", "            latent_dim=latent_dim,\n", ""),
    ),
    *_faults(
        "distributed/pool",
        "latent",
        ("workers forget the latents", "            latent_dim=latent_dim,\n", ""),
    ),
    *_faults(
        "distributed/keys",
        "latent",
        ("latents are dealt out", "if latent_dim != 0:", "if latent_dim < 0:"),
    ),
)

# 8-bit queries over caches of several workers.
QUERIES: tuple[Mutant, ...] = (
    *_faults(
        "distributed/shard_rows",
        "shard rows",
        ("q among new rows has no factor", "q.astype(np.float32) * own", "q.astype(np.float32)"),
        (
            "heads of q have other heads' factors",
            "np.repeat(factors, q.shape[-2] // len(factors))",
            "np.tile(factors, q.shape[-2] // len(factors))",
        ),
        ("an 8-bit q is rotated", "name_of(q.dtype) not in FP8", "True"),
    ),
    *_faults(
        "distributed/keys",
        "shard rows",
        ("q over old keys has no factor", 'if "q_descale" in options:', "if False:"),
        ("q of 16 bits has a factor", "expect(dtype in FP8,", "expect(True,"),
        (
            "partials are as narrow as q",
            "_dim_v), dtype=output_dtype(name_of(q.dtype)))",
            "_dim_v), dtype=name_of(q.dtype))",
        ),
    ),
)

MUTANTS: tuple[Mutant, ...] = (
    *PADDED,
    *LATENT,
    *QUERIES,
    *BIAS,
    *ONE_BATCH,
    *APART,
    *PACKED_MASKS,
    *PACKING,
    *_faults(
        "distributed/moving",
        "moves",
        ("a lease that never ends", "        cache.release(pages)\n", "        pass\n"),
        ("the source keeps its sequence", "    source.free(seq)\n", "    pass\n"),
        ("the whole deadline for the second step", "max(0.0, end - time.monotonic())", "timeout"),
    ),
    *_faults(
        "distributed/cache",
        "moves",
        (
            "a moved sequence stays at its home",
            "        self.free(seq)\n        return self._housed(home, handle)",
            "        return self._housed(home, handle)",
        ),
        (
            "requests are counted at the other worker",
            "(member if cache is source else home)",
            "(home if cache is source else member)",
        ),
        (
            "the new home is not counted",
            "        return self._housed(home, handle)\n",
            "        return PooledSequence(home.name, handle)\n",
        ),
        (
            "any worker is taken for a home",
            "self._pool.candidates().items() if name != member.name}",
            "self._pool.candidates().items()}",
        ),
    ),
    *_faults(
        "actors/kv_moving",
        "moves",
        ("what is refused is kept", "    if call.error is not None:\n        cache.tables.free(table)", "    return"),
        ("a lease that is the sequence", "lease = cache.tables.fork(table)", "lease = table"),
        ("pages are not checked", "            check_pages(given, cache.pool, cache.descales)\n", "            pass\n"),
        ("prefixes are not named", "            cache.tables.commit([write])\n", ""),
        (
            "known pages are sent to others' places",
            "[one[first:] for one",
            "[one[::-1][first:] for one",
        ),
    ),
    *_faults(
        "kv/transfer",
        "moves",
        (
            "a digest of K alone",
            "        for page in pages:\n            check.update",
            "        for page in pages[:1]:\n            check.update",
        ),
        ("rows that were never written leave", "    if rest:  #", "    if False:  #"),
        ("descales are not compared", "(own is None or np.array_equal(own, other))", "True"),
        (
            "pages are read in another order",
            "[(page, index) for index, page in enumerate(pages)]",
            "[(page, index) for index, page in enumerate(pages[::-1])]",
        ),
    ),
    *_faults(
        "kv/sequences",
        "moves",
        (
            "a full cache keeps what it found",
            "                    self._pool.release(page)\n                raise\n",
            "                    pass\n                raise\n",
        ),
    ),
    *_faults(
        "distributed/key_split",
        "keys",
        (
            "keys of the worker before",
            "np.clip(rest - worker * self.run, 0, self.run)",
            "np.clip(rest - (worker - 1) * self.run, 0, self.run)",
        ),
        (
            "a place in the wrong turn",
            "(whole * self.workers + worker) * self.run + rest",
            "(whole * self.workers + worker) * self.run",
        ),
        (
            "a window one key too far",
            "keys - 1 - begin, int(sinks[rows.start]), True",
            "keys - begin, int(sinks[rows.start]), True",
        ),
    ),
    *_faults(
        "distributed/key_split",
        "shard rows",
        ("keys before a tree are hidden", "bits[: count - len(mine)].sum", "bits[:0].sum"),
        (
            "a tree's keys lie first",
            "np.where(sees[:, mine], bits[count - len(mine) :]",
            "np.where(sees[:, mine], bits[: len(mine)]",
        ),
    ),
    *_faults(
        "distributed/shard_rows",
        "shard rows",
        (
            "q is not rotated",
            "            q = apply_rope",
            "            _ = apply_rope",
        ),
        ("rotated by the place in the request", "lengths = np.array([begin + len(k)])", "lengths = np.array([len(k)])"),
        ("tables' end is not checked", "        rows.check_reach(lengths)\n", ""),
        (
            "pairs are taken for halves",
            "k = apply_rope(k, *angles, interleaved=rows.rope.interleaved)",
            "k = apply_rope(k, *angles)",
        ),
        (
            "new rows attend without descales",
            "one.astype(np.float32) * _factors(descales, side)",
            "one.astype(np.float32)",
        ),
        ("V has K's descale", '    found = descales.get(f"{side}_descale")', '    found = descales.get("k_descale")'),
        (
            "a tree of bits is turned",
            "tree_bits(host)[:, None] >> np.arange(rows, dtype=np.uint64)",
            "tree_bits(host) >> np.arange(rows, dtype=np.uint64)[:, None]",
        ),
    ),
    *_faults(
        "distributed/keys",
        "shard rows",
        ("causal beside a tree", "causal=causal and tree is None", "causal=causal"),
        ("a tree among new rows is dropped", "            if tree is not None:\n", "            if False:\n"),
        ("a tree among cached rows is dropped", "= {} if within is None else", "= {} if True else"),
        (
            "a window beside a tree of cached rows",
            'if within is not None and (mask.mask != "full" or slopes is not None):',
            "if False:",
        ),
    ),
    *_faults(
        "distributed/keys",
        "keys",
        ("rows of other workers stay", "            for rank in written:\n", "            for rank in written[:0]:\n"),
        ("keys of a worker are one apart", "self.split.position(rank, 0), step", "self.split.position(rank, 0), 1"),
        ("keys of every worker begin at 0", "self.split.position(rank, 0), step", "0, step"),
        ("rows begin at the first key", "np.array([begin + early], np.int32)", "np.array([early], np.int32)"),
        ("a worker with positions has no mask", "for name in _MASKS} |", "for name in ()} |"),
        ("rows before the first key are asked for", "slice(early, count)", "slice(0, count)"),
        (
            "first keys among the new rows",
            "sinks_left = max(0, getattr(mask, SINKS) - length)",
            "sinks_left = getattr(mask, SINKS)",
        ),
        ("a cancelled append is left alone", "await asyncio.shield(writing)", "await writing"),
        (
            "a lost worker goes unnoticed",
            "        if always or isinstance(error, ContextLost | StaleBuffer):",
            "        if False:",
        ),
    ),
    *_faults(
        "distributed/context_parallel",
        "rows",
        ("each sequence begins at key 0", "(key_end - key - row_end + row) * shifted", "0"),
        (
            "rows of all sequences at the first",
            "np.arange(first + one.start, first + one.stop)",
            "np.arange(one.start, one.stop)",
        ),
        ("steps between positions are left out", "+= starts * step", "+= starts"),
        ("the last block's gradient alone", "total[tuple(cut)] += part", "total[tuple(cut)] = part"),
        ("late rows at one part", "self.blocks.append(_Block(part, cut,", "self.blocks.append(_Block(block // 2, cut,"),
        (
            "chunks begin at the block's first key",
            "first_key = -(offsets.min(initial=0) // chunk) * chunk",
            "first_key = -offsets.min(initial=0)",
        ),
        ("dropout by the place in the block", "request.dropout_p or chunked", "chunked"),
        (
            "positions of the first sequence for all",
            'begin = {"q_positions": first_key + offsets',
            'begin = {"q_positions": first_key + offsets[:1].repeat(len(offsets))',
        ),
    ),
    *_faults(
        "distributed/heads",
        "heads",
        ("dropout of the first heads", " + index * (counts[0] // parts)", ""),
        (
            "dropout of a part's own heads",
            "counts[0] if request.dropout_heads is None else request.dropout_heads",
            "None",
        ),
        ("heads of the first part", "range(index * each, (index + 1) * each)", "range(each)"),
    ),
)
