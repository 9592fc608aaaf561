"""The engine over the service: every logit is the plain model's, whatever runs beside it, and failures."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from support.generation import drift, generate_all, prompts, tiny

import gpu_actors as ga
from gpu_actors.generation import Engine, Sampling, Settings
from gpu_actors.testing import FaultPlan

# Shares of the logits' spread, about three times the measured ones. For CLOSE the plain model rounds the cache's
# contents at the same places, so only sums in another order differ, which may round to the other side. For NEAR the
# plain model computes in float32, so the roundings themselves count.
CLOSE = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 2.4e-2}
NEAR = {"float32": 1e-5, "float16": 1.5e-2, "bfloat16": 1.2e-1}


async def compare(
    given: list[list[int]], settings: Settings, device: str = "mock", new_tokens: int = 6, **sizes: int
) -> Any:
    """Generate for all prompts and compare every logit with the plain model's. Returns the engine's stats."""
    model = tiny(**sizes)
    async with ga.open_context(device) as ctx:
        begun, tokens, stats = await generate_all(ctx, model, given, settings, new_tokens)
        launches = ctx.stats()["kv_cache"]
        assert (launches.failed, launches.launched) == (0, model.config.layers * stats.steps), "one a layer and step"
    dtype, _ = settings.dtypes(model.weights.dtype)
    for generation, result in zip(begun, tokens, strict=True):
        assert generation.reason in ("length", "stop")
        assert result == [int(row.argmax()) for row in generation.logits]
        assert drift(model, generation, result, np.dtype(dtype)) < CLOSE[dtype]
        assert drift(model, generation, result, np.float32) < NEAR[dtype]
    return stats


async def idle(engine: Engine) -> None:
    """Wait until no text is left and all pages are free."""
    with anyio.fail_after(30):
        while engine.running or engine.waiting:
            await anyio.lowlevel.checkpoint()


class TestLogits:
    async def test_the_logits_of_one_text_are_numpys(self):
        stats = await compare([list(b"The quick brown fox")], Settings(blocks=16))
        assert (stats.steps, stats.rows, stats.tokens) == (6, 24, 6)

    @pytest.mark.parametrize("rows", [5, 256])
    async def test_many_texts_share_steps_and_prompts_are_cut_to_fit(self, rows):
        texts = prompts(5)
        stats = await compare(texts, Settings(blocks=64, page_size=8, rows=rows))
        assert stats.most_texts == 5
        assert stats.tokens == sum(6 + n % 3 for n in range(5))
        assert stats.rows == sum(map(len, texts)) + stats.tokens - 5
        assert stats.steps < stats.tokens

    async def test_the_logits_of_other_sizes_are_numpys(self):
        await compare(prompts(3), Settings(blocks=64, dtype="bfloat16"), heads=6, kv_heads=1, head_dim=64, layers=3)

    async def test_the_logits_of_the_emulated_kernels_are_numpys(self):
        await compare(prompts(2, 20), Settings(blocks=16, page_size=8, rows=12), "emulated", new_tokens=2)

    async def test_an_fp8_cache_stays_near(self):
        model = tiny()
        async with ga.open_context("mock") as ctx:
            settings = Settings(blocks=32, cache_dtype="float8_e4m3fn")
            begun, tokens, _ = await generate_all(ctx, model, prompts(2), settings)
        for generation, result in zip(begun, tokens, strict=True):
            assert drift(model, generation, result, np.float16) < 0.5


class TestBatching:
    async def test_texts_come_and_go_while_others_run(self):
        model = tiny()
        async with ga.open_context("mock") as ctx, Engine.open(ctx, model, Settings(blocks=64)) as engine:
            long = engine.submit([1, 2, 3], max_new_tokens=30)
            tokens = aiter(long)
            for _ in range(5):
                await anext(tokens)
            short = engine.submit([4, 5], max_new_tokens=3)
            result = await short.tokens()
            assert long.reason == "", "the short one came later and ended first"
            rest = [token async for token in tokens]
        alone = await self.alone([4, 5], 3)
        assert result == alone
        assert len(rest) == 25 or long.reason == "stop"

    async def alone(self, prompt: list[int], new_tokens: int) -> list[int]:
        async with ga.open_context("mock") as ctx, Engine.open(ctx, tiny(), Settings(blocks=64)) as engine:
            return await engine.submit(prompt, max_new_tokens=new_tokens).tokens()

    async def test_a_cache_that_is_too_small_for_all_lets_them_wait(self):
        texts = prompts(6, 30)
        stats = await compare(texts, Settings(blocks=12, page_size=8))
        assert stats.most_texts < 6

    async def test_a_cancelled_text_ends_and_the_others_go_on(self):
        async with ga.open_context("mock") as ctx, Engine.open(ctx, tiny(), Settings(blocks=64)) as engine:
            one, other = (engine.submit([n], max_new_tokens=40) for n in (1, 2))
            async for _ in one:
                one.cancel()
            assert one.reason == "cancelled"
            assert len(await other.tokens()) == 40 or other.reason == "stop"

    async def test_a_text_whose_deadline_passes_in_the_queue_is_never_begun(self):
        async with ga.open_context("mock") as ctx, Engine.open(ctx, tiny(), Settings(blocks=64)) as engine:
            late = engine.submit([1, 2, 3], max_new_tokens=4, deadline=time.monotonic())
            in_time = engine.submit([4, 5], max_new_tokens=4, deadline=time.monotonic() + 600)
            with pytest.raises(ga.DeadlineExceeded, match="passed in the queue"):
                await late.tokens()
            assert len(await in_time.tokens()) == 4 or in_time.reason == "stop"
            assert (late.begun, late.made, late.reason) == (None, [], "deadline")
            assert sum(engine.meter.queue.counts()) == 1
            assert engine._cache.stats().sequences <= 2

    async def test_leaving_ends_what_has_not_ended(self):
        async with ga.open_context("mock") as ctx:
            async with Engine.open(ctx, tiny(), Settings(blocks=512)) as engine:
                running = engine.submit([1], max_new_tokens=3000)
                first = await anext(aiter(running))
            assert running.reason == "cancelled"
            assert (await running.tokens())[0] == first


class TestPrefixes:
    """Prompts of 40 tokens, of which the first 35 are the same: two pages of 16 rows are shared."""

    GIVEN = [[*range(35), 100 + n, 7, 8, 9, n] for n in range(3)]

    async def test_a_beginning_that_was_computed_is_not_computed_again(self):
        model = tiny()
        options = {"keep_logits": True}
        async with ga.open_context("mock") as ctx, Engine.open(ctx, model, Settings(blocks=64), **options) as engine:
            result = []
            for prompt in self.GIVEN:
                generation = engine.submit(prompt, max_new_tokens=5)
                result.append((generation, await generation.tokens()))
            stats = engine.stats
        assert [generation.cached for generation, _ in result] == [0, 32, 32]
        count = sum(len(tokens) for _, tokens in result)
        assert (stats.cached, stats.rows) == (64, 120 - 64 + count - 3)
        for generation, tokens in result:
            assert drift(model, generation, tokens, np.float32) < CLOSE["float32"]

    async def test_pages_are_shared_while_both_run_and_all_come_back(self):
        async with ga.open_context("mock") as ctx, Engine.open(ctx, tiny(), Settings(blocks=64)) as engine:
            first = engine.submit(self.GIVEN[0], max_new_tokens=60)
            await anext(aiter(first))
            second = engine.submit(self.GIVEN[1], max_new_tokens=60)
            await anext(aiter(second))
            assert second.cached == 32
            assert engine.pages()[2] == 4, "two pages of each layer"
            for generation in (first, second):
                generation.cancel()
            await engine.submit([1], max_new_tokens=2).tokens()
            await idle(engine)
            assert engine.pages() == (64, 64, 0)

    async def test_a_layer_that_lost_its_pages_makes_the_others_begin_there(self):
        model = tiny()
        options = {"keep_logits": True}
        async with ga.open_context("mock") as ctx, Engine.open(ctx, model, Settings(blocks=9), **options) as engine:
            await engine.submit(self.GIVEN[0], max_new_tokens=2).tokens()
            # Four pages of nine are kept. This prompt takes six, so one is evicted: the second page of one layer.
            await engine.submit([9] * 40, max_new_tokens=2).tokens()
            assert engine._cache.stats().evicted == 1
            generation = engine.submit(self.GIVEN[1], max_new_tokens=5)
            tokens = await generation.tokens()
        assert generation.cached == 16
        assert drift(model, generation, tokens, np.float32) < CLOSE["float32"]

    async def test_sharing_can_be_turned_off(self):
        settings = Settings(blocks=64, share_prefixes=False)
        async with ga.open_context("mock") as ctx, Engine.open(ctx, tiny(), settings) as engine:
            for prompt in self.GIVEN[:2]:
                generation = engine.submit(prompt, max_new_tokens=2)
                await generation.tokens()
                assert generation.cached == 0


class TestFailures:
    async def test_stopping_ends_every_text_and_refuses_others(self):
        async with ga.open_context("mock") as ctx, Engine.open(ctx, tiny(), Settings(blocks=64)) as engine:
            running = engine.submit([1], max_new_tokens=400)
            await anext(aiter(running))
            waiting = engine.submit([2], max_new_tokens=500)
            engine.stop("the server is leaving")
            for generation in (running, waiting):
                with pytest.raises(ga.ActorStopped, match="leaving"):
                    await generation.tokens()
            with pytest.raises(ga.ActorStopped, match="leaving"):
                engine.submit([3], max_new_tokens=1)
            await idle(engine)
            assert engine.pages()[1] == 64
            assert engine.stats.ended == {"error": 2}

    async def test_an_accident_in_a_step_ends_its_texts_and_the_engine_goes_on(self, monkeypatch):
        async with ga.open_context("mock") as ctx, Engine.open(ctx, tiny(), Settings(blocks=64)) as engine:
            with monkeypatch.context() as patch:
                patch.setattr(engine._model, "embed", lambda tokens: 1 / 0)
                with pytest.raises(ga.ActorFailed, match="ZeroDivisionError"):
                    await engine.submit([1], max_new_tokens=4).tokens()
            assert await engine.submit([1], max_new_tokens=4).tokens()

    async def test_logits_that_are_not_finite_end_their_text_alone(self, monkeypatch):
        async with ga.open_context("mock") as ctx, Engine.open(ctx, tiny(), Settings(blocks=64)) as engine:
            logits = engine._model.logits

            def broken(x):
                result = logits(x)
                result[0] = np.nan
                return result

            monkeypatch.setattr(engine._model, "logits", broken)
            bad, good = (engine.submit([n], max_new_tokens=1) for n in (1, 2))
            with pytest.raises(ga.LaunchError, match="not finite"):
                await bad.tokens()
            assert len(await good.tokens()) == 1

    async def test_a_failed_launch_ends_the_texts_of_its_step_and_no_later_ones(self):
        options = ga.ContextOptions(fault_plan=FaultPlan().fail(launch=5))
        async with ga.open_context("mock", options) as ctx, Engine.open(ctx, tiny(), Settings(blocks=64)) as engine:
            for generation in [engine.submit([n], max_new_tokens=9) for n in (1, 2)]:
                with pytest.raises(ga.LaunchError):
                    await generation.tokens()
                assert generation.reason == "error"
            assert len(await engine.submit([3], max_new_tokens=4).tokens()) == 4

    async def test_what_can_never_be_generated_is_refused_at_once(self):
        wrong = [
            ([], 8),
            ([258], 8),
            ([-1], 8),
            ([1] * 4090, 8),
            ([1] * 200, 8),
            ([1.5], 8),
            ([[1]], 8),
            ([1 << 70], 8),
        ]
        async with ga.open_context("mock") as ctx, Engine.open(ctx, tiny(), Settings(blocks=16)) as engine:
            for prompt, most in [*wrong, ([1], 0), ([1], True)]:
                with pytest.raises(ga.InvalidRequest) as caught:
                    engine.submit(prompt, max_new_tokens=most)
                assert caught.value.field == ("prompt" if most == 8 else "max_new_tokens")

    async def test_the_loop_turns_while_texts_are_generated(self):
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0)
                ticks += 1

        async with ga.open_context("mock") as ctx, Engine.open(ctx, tiny(), Settings(blocks=64)) as engine:
            ticking = asyncio.ensure_future(tick())
            await engine.submit([1, 2, 3], max_new_tokens=10).tokens()
            ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ticking
        assert ticks > 100


async def test_a_prompt_that_is_scored_may_be_all_of_a_text():
    model = tiny()
    async with ga.open_context("mock") as ctx, Engine.open(ctx, model, Settings(blocks=16, rows=8)) as engine:
        prompt = list(b"more rows than one step has")
        sampling = Sampling(top_logprobs=1, score_prompt=True)
        generation = engine.submit(prompt, max_new_tokens=0, sampling=sampling)
        assert await generation.tokens() == []
        assert (generation.reason, len(generation.prompt_scores)) == ("length", len(prompt) - 1)
        again = engine.submit(prompt, max_new_tokens=1, sampling=sampling)
        assert len(await again.tokens()) == 1
        assert (again.cached, again.prompt_scores) == (0, generation.prompt_scores)
        with pytest.raises(ga.InvalidRequest, match="max_new_tokens"):
            engine.submit(prompt, max_new_tokens=0)
        with pytest.raises(ga.InvalidRequest, match="pages"):
            engine.submit([1] * 129, max_new_tokens=0, sampling=sampling)
        await engine.submit([1] * 128, max_new_tokens=0, sampling=sampling).tokens()
        await idle(engine)
