"""The hooks of one daemon: made of the configuration, fed by the event ring's sink."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any, get_args

from stallwatch.config.hooks import HooksConfig, Told
from stallwatch.control.service import Event
from stallwatch.evidence.tool import ToolRegistry
from stallwatch.hooks.command import CommandHook
from stallwatch.hooks.notice import Selector
from stallwatch.hooks.signing import load_secret
from stallwatch.hooks.spans import SpanHook
from stallwatch.hooks.webhook import WebhookHook
from stallwatch.hooks.worker import Deliver, Worker

PATIENCE_S = 5.0  # the last notices of a daemon that ends (EXHAUSTED) have this long to go out


class Hooks:
    """Does nothing without a [hooks] table. Raises ConfigError for a secret that cannot be used."""

    def __init__(self, config: HooksConfig | None) -> None:
        # Tools of their own: commands that cannot be killed must not use up evidence's allowance.
        self.tools = ToolRegistry()
        self.emit: Callable[..., Any] = lambda *_words: None  # the ring's, once there is one
        self._workers: list[tuple[Worker, Selector]] = []
        self._spans: SpanHook | None = None
        self._run = secrets.token_hex(4)
        if config is None:
            return
        told = Selector(config.events, run=self._run)
        secret = load_secret(config)
        if config.command:
            command = CommandHook(config.command, self.tools, deadline_s=config.command_deadline)
            self._add("command", command.deliver, told, config.queue)
        if config.webhook:
            webhook = WebhookHook(
                config.webhook,
                place=config.place,
                secret=secret,
                deadline_s=config.webhook_deadline,
                attempts=config.attempts,
                backoff=config.backoff,
            )
            self._add("webhook", webhook.deliver, told, config.queue)
        if config.spans:
            self._spans = SpanHook()
            # a span needs both of its ends, whatever the others are told
            self._add("spans", self._spans.deliver, self._everything(), config.queue)

    def _everything(self) -> Selector:
        return Selector(get_args(Told), run=self._run)

    def _add(self, name: str, deliver: Deliver, told: Selector, capacity: int) -> None:
        worker = Worker(f"hook-{name}", deliver, self._tell, capacity=capacity)
        self._workers.append((worker, told))

    def _tell(self, engine: str, type_: str, words: str) -> None:
        self.emit(engine, type_, words)

    def start(self) -> None:
        for worker, _ in self._workers:
            worker.start()

    def sink(self, event: Event) -> None:
        """For EventRing: runs in the thread of whoever emitted, and only fills a queue."""
        notices = {told: told.select(event) for told in {told for _, told in self._workers}}
        for worker, told in self._workers:
            notice = notices[told]
            if notice is not None:
                worker.offer(notice)

    def stop(self) -> None:
        """Deliver for a last moment, then end every command and connection."""
        until = time.monotonic() + PATIENCE_S
        for worker, _ in self._workers:
            left = worker.stop(max(0.0, until - time.monotonic()))
            if left:
                self.emit("", "fault", f"{worker.name}: {left} notices were never delivered")
        if self._spans is not None:
            self._spans.close()


class Owners:
    """Several registries of tools as the reaper's one."""

    def __init__(self, *registries: ToolRegistry) -> None:
        self._registries = registries

    def pids(self) -> frozenset[int]:
        return frozenset().union(*(registry.pids() for registry in self._registries))
