"""Prompts for a server, and the load that a number of clients make with them."""

from __future__ import annotations

import http.client
import itertools
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

POOL = 64
"""Prompts that are made; each request has one of them behind two token ids that make it a prompt of its own."""
OTHERS = "others/load"
"""Beginning of the rids of requests that the tap leaves alone; ``fleetdump/<run>`` are those that it captures."""


@dataclass
class Load:
    """What one stretch of load was. ``seconds`` is from the first request sent to the last answer."""

    tokens: int = 0
    requests: int = 0
    began: float = 0.0
    """As ``time.time()``, which the tap's journal has too."""
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    """Seconds of each request."""

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


class Prompts:
    """Bodies of ``/generate``: prompts of ``length`` random tokens, ``group`` of them a request. ``answer``: tokens to
    generate; with none SGLang only prefills, with one it may decode once more than that."""

    def __init__(self, vocabulary: int, length: int, group: int = 1, seed: int = 1, answer: int = 1):
        source = random.Random(seed)
        self.length = length
        self.group = group
        self._answer = answer
        self._vocabulary = vocabulary
        self._rest = [
            "".join(f",{source.randrange(3, vocabulary)}" for _ in range(length - 2)) + "]" for _ in range(POOL)
        ]
        self._count = itertools.count()

    @property
    def tokens(self) -> int:
        """Tokens a request."""
        return self.length * self.group

    def body(self, rids: str) -> bytes:
        """The next request; ``rids`` is the beginning of its rids."""
        numbers = [next(self._count) for _ in range(self.group)]
        ids = ",".join(self._prompt(number) for number in numbers)
        names = ",".join(f'"{rids}/{self.length}x{self.group}-{number}/1"' for number in numbers)
        many = self.group > 1
        rid, prompt = (f"[{names}]", f"[{ids}]") if many else (names, ids)
        sampling = f'{{"temperature":0,"max_new_tokens":{self._answer},"ignore_eos":true}}'
        return f'{{"rid":{rid},"input_ids":{prompt},"sampling_params":{sampling}}}'.encode()

    def _prompt(self, number: int) -> str:
        low, high = number % (self._vocabulary - 3), number // (self._vocabulary - 3)
        return f"[{3 + low},{3 + high}{self._rest[number % POOL]}"


def run_load(port: int, prompts: Prompts, rids: str, clients: int, more: Callable[[Load], bool]) -> Load:
    """Have ``clients`` send one request after the other for as long as ``more`` says so of what was sent. Raises
    ``RuntimeError`` when a request fails."""
    load, lock = Load(began=time.time()), threading.Lock()
    failures: list[Exception] = []

    def take() -> bytes | None:
        with lock:
            if failures or not more(load):
                return None
            load.tokens += prompts.tokens
            load.requests += 1
            return prompts.body(rids)

    def work() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        try:
            for body in iter(take, None):
                start = time.perf_counter()
                post(connection, body)
                load.latencies.append(time.perf_counter() - start)
        except Exception as error:
            failures.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=work) for _ in range(clients)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    load.seconds = time.perf_counter() - start
    if failures:
        raise RuntimeError(f"a request failed: {failures[0]!r}")
    return load


def for_seconds(seconds: float) -> Callable[[Load], bool]:
    """Load until so many seconds after its begin."""
    return lambda load: time.time() - load.began < seconds


def for_requests(count: int) -> Callable[[Load], bool]:
    """Load of so many requests."""
    return lambda load: load.requests < count


def post(connection: http.client.HTTPConnection, body: bytes) -> bytes:
    """One ``/generate``. Raises ``RuntimeError`` for another status than 200."""
    connection.request("POST", "/generate", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    text = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"/generate answered {answer.status}: {text[:300]!r}")
    return text
