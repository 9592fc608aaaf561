"""Faults to seed into the host code of a launch; host.py runs them."""

from __future__ import annotations

from collections.abc import Mapping

from mutation.forward_mutants import Mutant

__all__ = ["MUTANTS", "PROBES"]

_LAYER = "softgpu/tests/test_device_layer.py::test_"
_CANDIDATE = "tests/gpu/test_kernels.py::test_a_candidate_is_answered_right"


def _layer(*names: str) -> tuple[str, ...]:
    return tuple(_LAYER + name for name in names)


def _request(*names: str) -> tuple[str, ...]:
    return tuple(f"{_CANDIDATE}[{name}]" for name in names)


PROBES: Mapping[str, tuple[str, ...]] = {
    "host operands": _layer("operands_of_the_host", "results_lie_where_the_caller_says"),
    "device operands": _layer("operands_on_the_device"),
    "late producers": _layer("work_of_the_callers_stream_is_waited_for"),
    "several producers": _layer("each_of_several_streams_is_waited_for"),
    "joined": _layer("arrays_of_several_requests_are_joined"),
    "recorded": _layer(
        "a_recorded_launch_is_replayed_over_new_operands", "recorded_launches_at_once_have_records_of_their_own"
    ),
    "streams": _layer("streams_do_not_mix_their_memory"),
    "dropped events": _layer("events_that_nobody_waits_for_are_settled"),
    "default stream": _layer("the_default_stream_is_not_waited_for"),
    "shared memory": _layer("shared_memory_up_to_the_devices_limit", "a_launch_that_is_refused_leaves_nothing"),
    "cleared memory": _layer("new_memory_is_cleared_before_any_stream_sees_it"),
    "pressure": _layer("memory_is_spared_before_a_request_fails", "a_full_device_refuses_one_request"),
    "probe": _layer("probes_pass_and_see_a_slow_device"),
    "modules": _layer("the_driver_is_asked_for_no_more_than_once_a_cubin"),
    "lost": _layer("a_lost_event_is_a_hung_device", "a_failed_launch_loses_the_device_for_all"),
    "hopper": _request("forward float16 64 causal", "forward bfloat16 128 window varlen"),
    "hopper fp8": _request("forward float8_e4m3fn grouped"),
    "options": _request("forward with bias", "forward with alibi", "forward with sinks", "forward with dropout"),
    "backward": _request("backward float16 64 causal", "backward varlen", "backward with bias", "backward with sinks"),
    "deterministic": _request("backward deterministic"),
    "decode": _request("decode", "decode many keys", "decode of small pages"),
    "lengths on the device": ("tests/gpu/test_decode.py::test_lengths_on_the_device_are_split_there",),
    "decode of arrays": _request("decode of arrays"),
    "append": (
        "tests/gpu/test_kv_growth.py::test_sequences_grow_fork_and_are_attended_to[16-bfloat16]",
        "tests/gpu/test_kv_cache_on_gpu.py::test_attention_over_appended_rows_is_the_oracles[halves]",
    ),
}


def _faults(kernel: str, file: str, *faults: tuple[str, str, str, str]) -> list[Mutant]:
    """faults: name, old text, new text, probe."""
    return [Mutant(name, kernel, f"gpu_actors/{file}", old, new, (probe,)) for name, old, new, probe in faults]


_COPY_UP = "runtime.memcpyAsync(device, host, nbytes, runtime.memcpyHostToDevice, stream)"
_COPY_DOWN = "runtime.memcpyAsync(host, device, nbytes, runtime.memcpyDeviceToHost, stream)"
_COPY_ACROSS = "runtime.memcpyAsync(device, source, nbytes, runtime.memcpyDeviceToDevice, stream)"
_FILL = "runtime.memsetAsync(device, value, nbytes, stream)"
_CUT_ROWS = "layout.named(cut_rows(key, problem))"
_LAUNCH = "driver.launchKernel(function, *grid, *block, shared_bytes, stream, where, 0)"

_CALLS = _faults(
    "cupy_api",
    "devices/cuda/cupy_api.py",
    ("upload: addresses exchanged", _COPY_UP, _COPY_UP.replace("device, host", "host, device"), "host operands"),
    ("upload: on the default stream", _COPY_UP, _COPY_UP.replace("stream)", "0)"), "host operands"),
    ("upload: half of it", _COPY_UP, _COPY_UP.replace("nbytes", "nbytes // 2"), "host operands"),
    ("download: addresses exchanged", _COPY_DOWN, _COPY_DOWN.replace("host, device", "device, host"), "host operands"),
    ("download: on the default stream", _COPY_DOWN, _COPY_DOWN.replace("stream)", "0)"), "host operands"),
    ("copy: addresses exchanged", _COPY_ACROSS, _COPY_ACROSS.replace("device, source", "source, device"), "joined"),
    ("copy: on the default stream", _COPY_ACROSS, _COPY_ACROSS.replace("stream)", "0)"), "joined"),
    ("fill: on the default stream", _FILL, _FILL.replace("stream)", "0)"), "host operands"),
    ("fill: another value", _FILL, _FILL.replace("value", "value + 64"), "host operands"),
    ("fill: value and size exchanged", _FILL, _FILL.replace("value, nbytes", "nbytes % 256, value"), "host operands"),
    ("launch: on the default stream", _LAUNCH, _LAUNCH.replace(" stream,", " 0,"), "host operands"),
    ("launch: grid and block exchanged", _LAUNCH, _LAUNCH.replace("*grid, *block", "*block, *grid"), "host operands"),
    ("launch: no shared memory", _LAUNCH, _LAUNCH.replace("shared_bytes", "0"), "shared memory"),
    ("launch: every parameter is the last", "pointers[place] = address", "pointers[0] = address", "shared memory"),
    ("launch: parameters backwards", "pointers[place] = address", "pointers[-1 - place] = address", "shared memory"),
    ("launch: parameters overlap", "address += nbytes", "address += 4", "shared memory"),
    ("stream: waits for the default stream", "(runtime.streamNonBlocking)", "(0)", "default stream"),
    ("wait: dropped", "runtime.streamWaitEvent(stream, event)", "pass", "late producers"),
    (
        "wait: by the default stream",
        "runtime.streamWaitEvent(stream, event)",
        "runtime.streamWaitEvent(0, event)",
        "late producers",
    ),
    (
        "record: on the default stream",
        "runtime.eventRecord(event, stream)",
        "runtime.eventRecord(event, 0)",
        "host operands",
    ),
    ("event: always done", "return bool(status == 0)", "return True", "dropped events"),
    ("synchronize: dropped", "runtime.eventSynchronize(event)", "pass", "host operands"),
    ("graph: never destroyed", "runtime.graphDestroy(graph)", "pass", "recorded"),
    ("graph: its executable is never destroyed", "runtime.graphExecDestroy(graph)", "pass", "recorded"),
    ("event: never destroyed", "runtime.eventDestroy(event)", "pass", "host operands"),
    ("stream: never destroyed", "runtime.streamDestroy(stream)", "pass", "host operands"),
    ("module: never unloaded", "driver.moduleUnload(module)", "pass", "host operands"),
    ("pinned memory: never freed", "runtime.freeHost(address)", "pass", "host operands"),
    ("pool: never trimmed", "self._pool.free_all_blocks()", "pass", "host operands"),
    ("attribute: another one", "SHARED_SIZE_BYTES = 8", "SHARED_SIZE_BYTES = 9", "shared memory"),
    ("attribute: half of the bytes", "SIZE_BYTES, nbytes)", "SIZE_BYTES, nbytes // 2)", "shared memory"),
    (
        "capability: digits exchanged",
        '10 * raw["major"] + raw["minor"]',
        '10 * raw["minor"] + raw["major"]',
        "host operands",
    ),
)
_MAPS = _faults(
    "tensor_map",
    "devices/cuda/tensor_map.py",
    ("shape and strides exchanged", "(*tensor_map.shape)", "(*(*tensor_map.strides, 1))", "hopper"),
    ("box backwards", "*tensor_map.box", "*tensor_map.box[::-1]", "hopper"),
    (
        "a row less",
        "*tensor_map.box",
        "*(tensor_map.box[0], max(1, tensor_map.box[1] - 1), *tensor_map.box[2:])",
        "hopper",
    ),
    ("another swizzle", '"128B": 3', '"128B": 2', "hopper"),
    ("every second element", "*[1] * rank", "*[2] * rank", "hopper"),
    (
        "interleaved",
        "_NO_INTERLEAVE, _PROMOTE_TO_256_BYTES, _ZEROS_OUT_OF_BOUNDS = 0,",
        "_NO_INTERLEAVE, _PROMOTE_TO_256_BYTES, _ZEROS_OUT_OF_BOUNDS = 1,",
        "hopper",
    ),
    ("elements of 32 bits", '"float16": 6', '"float16": 7', "hopper"),
    ("address of the next element", "c_void_p(tensor_map.address)", "c_void_p(tensor_map.address + 2)", "hopper"),
    ("a dimension less", "rank = len(tensor_map.shape)", "rank = len(tensor_map.shape) - 1", "hopper"),
)
_STREAM = _faults(
    "stream",
    "devices/cuda/stream.py",
    ("nothing is uploaded", "    operands.upload(api, stream)\n", "", "host operands"),
    (
        "download in the kernels' place",
        "    operands.upload(api, stream)\n",
        "    operands.upload(api, stream)\n    operands.download(api, stream)\n    return\n",
        "host operands",
    ),
    ("producers are not waited for", "for producer in operands.producers:", "for producer in ():", "late producers"),
    (
        "one of several producers is waited for",
        "for producer in operands.producers:",
        "for producer in sorted(operands.producers)[:1]:",
        "several producers",
    ),
    (
        "the producer waits instead",
        "api.record_event(event, producer)\n        api.wait_event(stream, event)",
        "api.record_event(event, stream)\n        api.wait_event(producer, event)",
        "late producers",
    ),
    (
        "waits before the record",
        "api.record_event(event, producer)\n        api.wait_event(stream, event)",
        "api.wait_event(stream, event)\n        api.record_event(event, producer)",
        "late producers",
    ),
    (
        "the event before the work",
        "_compute(api, stream, operands, kernels)\n            api.record_event(flight.event, stream)",
        "api.record_event(flight.event, stream)\n            _compute(api, stream, operands, kernels)",
        "host operands",
    ),
    (
        "the event before the graph",
        "api.launch_graph(recorded.graph, stream)\n                api.record_event(flight.event, stream)",
        "api.record_event(flight.event, stream)\n                api.launch_graph(recorded.graph, stream)",
        "recorded",
    ),
    ("settled without a wait", "self.driver.call(self.driver.api.synchronize_event, event)", "pass", "host operands"),
    (
        "memory back before the results",
        "self.outputs = self.operands.results()\n                self.operands.release()",
        "self.operands.release()\n                self.outputs = self.operands.results()",
        "host operands",
    ),
    (
        "dropped events are settled at once",
        "(flights[0].orphaned and flights[0].settle_if_over())",
        "(flights[0].orphaned and (flights[0].settle() or True))",
        "dropped events",
    ),
    ("the attribute is not set", "function.prepare(api, geometry.shared_bytes)", "pass", "shared memory"),
    ("the operands of the last replay", "recorded.rebind(launch)", "pass", "recorded"),
    ("the event of a flight is kept", "self.driver.destroy_event(event)", "pass", "host operands"),
    ("a closed stream is kept", "self._driver.api.destroy_stream(self.handle)", "pass", "streams"),
)
_OPERANDS = _faults(
    "operands",
    "devices/cuda/operands.py",
    (
        "upload without what comes back",
        "self._staging_in.address, self._up.size + self._both.size, stream",
        "self._staging_in.address, self._up.size, stream",
        "host operands",
    ),
    (
        "download from the first byte",
        "source = self._block.address + self._up.size",
        "source = self._block.address",
        "host operands",
    ),
    (
        "download of the outputs alone",
        "source, self._both.size + self._down.size, stream",
        "source, self._down.size, stream",
        "host operands",
    ),
    ("joined parts on each other", "address += part.nbytes", "address += 0", "joined"),
    ("nothing is cleared", "for name in self._cleared:", "for name in ():", "host operands"),
    (
        "a quarter is cleared",
        "math.prod(buffer.shape) * dtype_of(buffer.dtype).itemsize, stream",
        "math.prod(buffer.shape), stream",
        "host operands",
    ),
    ("outputs over inputs", "address = base + down + offset", "address = base + offset", "host operands"),
    (
        "joined arrays over inputs",
        "self.buffers[name] = _buffer(address, joined.shape",
        "address = base + offset\n            self.buffers[name] = _buffer(address, joined.shape",
        "joined",
    ),
    ("the table's address is the first", "_buffer(base + late.offset", "_buffer(base", "host operands"),
    ("producers of arrays are forgotten", "self.producers.add(array.stream)", "pass", "late producers"),
    (
        "staged over each other",
        "_staged(self._staging_in, self._up.size + offset, array.shape",
        "_staged(self._staging_in, offset, array.shape",
        "host operands",
    ),
    (
        "results from the wrong place",
        "_staged(self._staging_out, self._both.size + offset",
        "_staged(self._staging_out, offset",
        "host operands",
    ),
    ("no memory for scratch", "size = inner + self._inner.size", "size = inner", "joined"),
)
_MEMORY = [
    *_faults(
        "memory",
        "devices/cuda/memory.py",
        ("a staging block for two", "return idle.pop()", "return idle[-1]", "streams"),
        (
            "staging of half the size",
            "1 << (nbytes - 1).bit_length()",
            "1 << (nbytes - 1).bit_length() - 1",
            "hopper",
        ),
        (
            "every operand at the same place",
            "self.size += -(-nbytes // ALIGNMENT) * ALIGNMENT",
            "self.size = -(-nbytes // ALIGNMENT) * ALIGNMENT",
            "host operands",
        ),
        (
            "staging is never given back",
            "                self._api.free_pinned(block.address)",
            "                pass",
            "host operands",
        ),
        (
            "no second try",
            "raise driver.failed(failure) from failure\n        driver.call(driver.api.trim)",
            "pass\n        raise OutOfDeviceMemory(what)\n        driver.call(driver.api.trim)",
            "pressure",
        ),
    ),
    *_faults(
        "module",
        "devices/cuda/module.py",
        (
            "the attribute is set for 1 GiB",
            "if shared_bytes > self._shared_bytes:",
            "if shared_bytes > 1 << 30:",
            "shared memory",
        ),
        ("functions are not remembered", "self._functions[image, entry] = function", "pass", "modules"),
        ("a closed device's modules stay", "for module in loaded:", "for module in ():", "host operands"),
    ),
    *_faults(
        "recorded",
        "devices/cuda/recorded.py",
        ("a graph is never dropped", "driver.api.destroy_graph(self.graph)", "pass", "recorded"),
        ("its memory is never dropped", "        self._operands.release()", "        pass", "recorded"),
        ("a capture that is not ended", "    return api.end_capture(stream)", "    return stream", "recorded"),
    ),
    *_faults(
        "device",
        "devices/cuda/device.py",
        ("cleared memory is not waited for", "api.synchronize_event(event)", "pass", "cleared memory"),
        (
            "half is cleared",
            "api.fill(address, 0, nbytes, stream)",
            "api.fill(address, 0, nbytes // 2, stream)",
            "cleared memory",
        ),
        ("the stream of a fill stays", "api.destroy_stream(stream)", "pass", "cleared memory"),
        ("the event of a fill stays", "api.destroy_event(event)", "pass", "cleared memory"),
        ("modules outlive the device", "self._modules.close()", "pass", "host operands"),
        ("staging outlives the device", "self.memory.close()", "pass", "host operands"),
        ("the pool outlives the device", "self.driver.api.close()", "pass", "host operands"),
    ),
    *_faults(
        "probe",
        "devices/cuda/probe.py",
        (
            "a hung device passes",
            "            if now >= until:\n                return False",
            "            if now >= until:\n                return True",
            "lost",
        ),
        (
            "nothing is filled",
            "driver.call(api.fill, self._memory.address, value, _BYTES, stream)",
            "pass",
            "probe",
        ),
        ("a probe's stream stays", "self._driver.api.destroy_stream(self._stream)", "pass", "probe"),
    ),
    *_faults(
        "driver",
        "devices/cuda/driver.py",
        ("a lost device goes on", "self.lose(str(error))", "pass", "lost"),
    ),
    *_faults(
        "errors",
        "devices/cuda/errors.py",
        ("a failed launch is not sticky", '    719: "cudaErrorLaunchFailure",\n', "", "lost"),
    ),
]
_PARAMS = [
    *_faults(
        "params",
        "kernels/params.py",
        (
            "q and out exchanged",
            'yield operand("q", axes, (*rows, p.heads_q, p.head_dim), p.dtype)',
            'yield operand("q", axes, (*rows, p.heads_q, p.head_dim), p.dtype, field="out")',
            "options",
        ),
        (
            "window's sides exchanged",
            "left, right = problem.window_size",
            "right, left = problem.window_size",
            "hopper",
        ),
        ("dropout is not made up for", "1.0 / (1.0 - problem.dropout_p)", "1.0", "options"),
        (
            "strides of the wrong axes",
            "values[index] = buffer.strides[axis]",
            "values[index] = buffer.strides[-1 - axis]",
            "options",
        ),
        (
            "the sinks' dtype is not told",
            'buffers["sinks"].dtype == "float32"',
            'buffers["sinks"].dtype != "float32"',
            "options",
        ),
    ),
    *_faults(
        "hopper",
        "kernels/hopper/params.py",
        (
            "rows' and heads' strides exchanged",
            "(strides[1], strides[2], strides[0])",
            "(strides[2], strides[1], strides[0])",
            "hopper",
        ),
        ("a box of other rows", "itemsize, rows, 1, 1)", "itemsize, max(1, rows // 2), 1, 1)", "hopper"),
        ("always the narrow swizzle", '"128B" if wide else "64B"', '"64B"', "hopper"),
        ("v's map over k", "rows_map(v, buffers[v]", "rows_map(v, buffers[k]", "hopper"),
        ("boxes of values turned", "buffers[v], dim_v, keys, encode", "buffers[v], keys, dim_v, encode", "hopper fp8"),
        ("the output's map over q", 'rows_map("out", buffers["out"]', 'rows_map("out", buffers["q"]', "hopper"),
        ("groups of one head", '"head_group": problem.gqa_ratio', '"head_group": 1', "hopper"),
        (
            "tiles of rows are all tiles",
            "layout.named(sections) | {",
            'layout.named(sections) | {"tiles": sections.row_tiles, ',
            "hopper",
        ),
    ),
    *_faults(
        "hopper",
        "kernels/hopper/launch.py",
        ("the counter is not cleared", 'ScratchSpec((1,), "int32", zero=True)', 'ScratchSpec((1,), "int32")', "hopper"),
    ),
    *_faults(
        "backward",
        "kernels/backward/launch.py",
        (
            "sums of dq are not cleared",
            'ScratchSpec((slots, floats), "float32", zero=True)',
            'ScratchSpec((slots, floats), "float32")',
            "backward",
        ),
        (
            "turns are not cleared",
            'ScratchSpec((slots, *shares), "int32", zero=True)',
            'ScratchSpec((slots, *shares), "int32")',
            "deterministic",
        ),
    ),
    *_faults(
        "decode",
        "kernels/decode/params.py",
        ("a range less", '"ranges": ranges', '"ranges": ranges - 1', "decode"),
        (
            "page's factor and shift exchanged",
            '"page_factor": factor, "page_shift": shift',
            '"page_factor": shift, "page_shift": factor',
            "decode",
        ),
        (
            "addresses of one array",
            "addresses.append(buffer.address)",
            "addresses.append(first.address)",
            "decode of arrays",
        ),
        ("batch of one", '"batch": problem.batch,', '"batch": 1,', "lengths on the device"),
    ),
    *_faults(
        "decode",
        "kernels/decode/launch.py",
        ("parts for one range", "or 2 * ranges", "or 2", "decode"),
        (
            "k's addresses for v",
            'pack_pointers, problem, f"{side}_cache"',
            'pack_pointers, problem, "k_cache"',
            "decode of arrays",
        ),
    ),
    *_faults(
        "append",
        "kernels/append/params.py",
        ("heads exchanged", _CUT_ROWS, f'{_CUT_ROWS} | {{"heads_kv": problem.heads_q}}', "append"),
        ("another page size", _CUT_ROWS, f'{_CUT_ROWS} | {{"page_size": problem.page_size * 2}}', "append"),
        ("a turn in 2^63 units", "2.0**64)", "2.0**63)", "append"),
    ),
]

MUTANTS: tuple[Mutant, ...] = (*_CALLS, *_MAPS, *_STREAM, *_OPERANDS, *_MEMORY, *_PARAMS)
