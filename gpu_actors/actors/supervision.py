"""Supervisor: what happens when a child fails.

Models: Erlang/OTP's supervisor (restart strategies, intensity and period, escalation) and Akka's backoff. It keeps no
thread of its own: the ContextActor feeds it reports and timers, so every decision is taken on one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from gpu_actors.actors.post import Post
from gpu_actors.clock import Clock
from gpu_actors.options import RestartPolicy
from gpu_actors.tracing import Trace

__all__ = ["Supervisor"]


class After(Protocol):
    """Runs a function on the supervisor's thread once so many seconds have passed."""

    def __call__(self, seconds: float, function: Callable[[], None]) -> object: ...


class Supervisor:
    """Restarts children by a policy, and escalates when they fail too often.

    escalate: called with the post and its error when the policy grants no further restart.
    """

    def __init__(
        self,
        posts: Iterable[Post],
        policy: RestartPolicy,
        clock: Clock,
        trace: Trace,
        after: After,
        escalate: Callable[[Post, BaseException], None],
    ) -> None:
        self._posts = list(posts)
        self._policy = policy
        self._clock = clock
        self._trace = trace
        self._after = after
        self._escalate = escalate
        self._failures: deque[float] = deque()
        self._asked: set[Post] = set()
        self._due: set[Post] = set()
        self._errors: dict[Post, BaseException] = {}
        self.stopping = False

    def start(self) -> None:
        for post in self._posts:
            post.start()

    def ready(self, post: Post, urn: str) -> None:
        """A child's incarnation has opened."""
        if not self._current(post, urn) or post.state in ("stopped", "failed"):
            return
        restarted = post.state == "restarting"
        post.state = "running"
        if restarted:
            error = self._errors.pop(post, None)
            self._trace.emit("actor.restarted", actor=post.name, restarts=post.restarts, error=error)

    def failed(self, post: Post, urn: str, error: BaseException) -> None:
        """A child's incarnation raised: restart it, all of them, or escalate."""
        if not self._current(post, urn):
            return
        if self.stopping or post in self._asked:
            self.stopped(post, urn)
            return
        post.ref = None
        now = self._clock.now()
        while self._failures and now - self._failures[0] > self._policy.window:
            self._failures.popleft()
        if len(self._failures) >= self._policy.max_restarts:
            self._trace.emit("actor.failed", actor=post.name, error=error)
            self._escalate(post, error)
            return
        delay = self._policy.delay(len(self._failures))
        self._failures.append(now)
        siblings = [member for member in self._posts if member.state not in ("stopped", "failed")]
        group = siblings if self._policy.strategy == "all_for_one" else [post]
        for member in group:
            member.state = "restarting"
            self._errors.setdefault(member, error)
            if member.ref is not None:
                self._asked.add(member)
                member.stop()
        self._after(delay, lambda: self._restart(group))

    def stopped(self, post: Post, urn: str) -> None:
        """A child's incarnation has stopped: on request, or for good if nobody asked it to."""
        if not self._current(post, urn):
            return
        post.ref = None
        asked = post in self._asked
        self._asked.discard(post)
        if self.stopping:
            post.terminate(None)
        elif post in self._due:
            self._replace(post)
        elif not asked:
            post.retire()

    def _restart(self, group: list[Post]) -> None:
        for post in group:
            if post.ref is None:
                self._replace(post)
            else:
                # Still at its last call: two incarnations at one mailbox would overtake each other.
                self._due.add(post)

    def _replace(self, post: Post) -> None:
        self._due.discard(post)
        if not self.stopping:
            post.restarts += 1
            post.start()

    def _current(self, post: Post, urn: str) -> bool:
        return post.ref is not None and post.ref.actor_urn == urn
