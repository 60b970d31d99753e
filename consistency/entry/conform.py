"""Does an engine hold the weights that it was sent? A conformance run of its weight updates.

    update ──> sample prompts ──> log-probs of the tokens under each set of weights that the engine
                                  may hold: before, after, other, or a mixture ──> whose are they?

The weights are sent by the updates of `areal_core.servers`. Nothing else may use the engine
meanwhile; the last check sends those of the model's folder back, also after an error or Ctrl-C.
"""

import random
import signal
import sys
import tempfile
import time
import tomllib
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from areal_core.rollout import errors
from areal_core.rollout.errors import RequestRefused
from areal_core.rollout.types import Sampling
from areal_core.servers.client import adapter_name
from areal_core.servers.identity import ServerIdentity
from areal_core.servers.pool import ServerPool
from areal_core.servers.reply import Chunk, json_of
from areal_core.servers.server import Server, call, is_reachable
from areal_core.servers.sglang import CACHE, SGLANG, WEIGHTS
from areal_core.servers.update_group import UpdateGroup
from areal_core.servers.vllm import VLLM
from areal_core.servers.weight_update import AdapterUpdate, BroadcastUpdate, DiskUpdate, WeightUpdate
from areal_core.servers.wire import LastBucket, Wire, weight_version
from consistency.case import DTYPES
from consistency.engines import call_all
from consistency.entry.known_weights import ADAPTED, AFTER, BEFORE, OTHER, KnownWeights, Rows, WeightSet
from consistency.errors import EngineError
from consistency.score import load_scorer
from consistency.source import model_dtype, published_noise
from consistency.tensors import find_stale_tensors
from consistency.tokens import Completion, Floats, sequences_from_completions

Verdict = Literal["pass", "fail", "not offered", "undecided"]
FOLDER, BROADCAST, ADAPTER = "folder", "broadcast", "conform"
NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 6, 48, 24
LONG_TOKENS = 400  # of requests in flight
UNTIL_UPDATE_S = (0.3, 0.1, 0.03, 0.0, 0.0)  # a further attempt, where they had ended before
GROUP_S = 60.0  # until a process group has formed
APART = 10.0  # times the noise floor: the least distance of two sets of weights
MESSAGE, NO_ROUTE = 300, (404, 405, 501)  # characters of a refusal, its status without a route
NO_GPU, ENDED = "a process group with an engine on a GPU needs one here", "not run: the engine has ended"
MIXED, NEITHER, STALE = "mixed", "none of these", "on the cache of the old weights"
Kinds = tuple[str, str, str]
FIRST, LAST = (AFTER, "", ""), ("", "", AFTER)  # one part of three
LABELLED = "as the versions say"
TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
# What a check may raise because of the engine.
REFUSED = (RequestRefused, errors.WeightUpdateFailed, errors.MalformedReply)
BROKEN = (*REFUSED, errors.ServerDied, dist.DistError, OSError)
Candidates = Mapping[str, WeightSet | list[Floats]]


@dataclass(frozen=True)
class Check:
    """The result of one check.

    `expected` and `held` are names of sets of weights; `held` is "" if nothing was sampled.
    `distances` is the mean |D| of the tokens from each set that the engine may hold, in nats.
    """

    verdict: Verdict
    expected: str = ""
    held: str = ""
    distances: Mapping[str, float] = field(default_factory=dict)
    evidence: str = ""
    name: str = ""


class CutGroup(UpdateGroup):
    """A group whose connection is cut in the middle of a bucket."""

    def cut(self, bucket: Sequence[tuple[str, torch.Tensor]], last: LastBucket) -> None:
        """Announce all tensors, send half of them, and leave."""
        names, tensors = zip(*bucket, strict=True)
        shapes = [list(tensor.shape) for tensor in tensors]
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
        replies = self.pool.start_post(
            lambda _: self.pool.wire.receive(list(names), dtypes, shapes, self.name, last)
        )
        for tensor in tensors[: len(tensors) // 2]:
            dist.broadcast(tensor.contiguous(), src=0, group=self._group)
        self.break_off()
        for reply in replies:
            with suppress(RequestRefused, OSError):
                reply.future.result()


def connect(address: str) -> tuple[Wire, Server, ServerIdentity]:
    """Identify the server at `host:port`. Raises `EngineError` if it is none of a known engine."""
    server, reasons = Server(address.rpartition("://")[2].strip("/").removesuffix("/v1")), []
    for wire in (SGLANG, VLLM):
        try:
            return wire, server, wire.ask_identity(server)
        except (OSError, errors.WrongServer) as error:
            reasons.append(str(error))
    raise EngineError("; ".join(reasons))


class Engine:
    """The server, how weights get to it, and how many versions it was sent."""

    def __init__(self, address: str, path: str, folder: Path) -> None:
        self.wire, self.server, self.identity = connect(address)
        self.folder, self.pool = folder, ServerPool([self.server], self.wire, pause_mode="retract")
        self.tag = weight_version(self.server, self.wire)  # before the run
        self.version = int(self.tag) if self.tag.isdecimal() else 0
        self.sent = self.tag  # the last version that was sent in full
        self.backend = "gloo" if self.identity.device == "cpu" else "nccl"
        ranks = self.identity.num_devices
        self.broadcast = BroadcastUpdate(self.pool, self.backend, ranks_per_server=ranks, timeout_s=GROUP_S)
        folders = DiskUpdate(self.pool, folder / FOLDER, Path(path))
        self.updates: dict[str, WeightUpdate] = {FOLDER: folders, BROADCAST: self.broadcast}
        self.works = [FOLDER, BROADCAST]  # the ways that have not failed
        if self.backend == "nccl" and not torch.cuda.is_available():
            self.works.remove(BROADCAST)  # a process group with a GPU needs one here

    def checksums(self) -> Mapping[str, object] | None:
        """Return the engine's own checksums; None without the route."""
        try:
            (body,) = self.pool.post(self.wire.checksums()).values()
            return self.wire.parse_checksums(body).checksums
        except REFUSED:
            return None

    def ask(self, prompts: Sequence[Sequence[int]], num_new: int, adapter: str = "") -> list[Chunk]:
        """Sample completions at temperature 1 that no stop token ends."""

        def one(prompt: Sequence[int]) -> Chunk:
            options, rid = Sampling(ignore_eos=True), uuid.uuid4().hex
            payload = self.wire.generate_payload(list(prompt), options, num_new, 0, rid)
            payload |= self.wire.adapter_fields(adapter) if adapter else {}
            body = call(self.server, "POST", self.wire.routes.generate, payload, timeout_s=300.0)
            return self.wire.parse_generate(body.encode())

        return call_all([partial(one, prompt) for prompt in prompts], len(prompts), lambda _: None)


@dataclass(eq=False)
class Conformance:
    """The checks; `holds` is the set that the engine should hold after the last update."""

    engine: Engine
    known: KnownWeights
    level: float
    report: Callable[[Check], None]
    checks: list[Check] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)  # of each sampling: wrong versions
    logprobs: list[Floats] = field(default_factory=list)  # of the last rows, as reported
    draw: random.Random = field(default_factory=partial(random.Random, 0))

    def __post_init__(self) -> None:
        self.holds, self.checksums = self.known.whole(BEFORE), self.engine.checksums()
        self.size = self.known.scorer.head.vocabulary_size
        self.first = cycle(self.draw.sample(range(self.size), min(self.size, 1000)))

    def prompts(self) -> list[list[int]]:
        """Draw prompts whose first token no other one has: no cache has their beginning."""
        rest = [self.draw.choices(range(self.size), k=PROMPT_TOKENS - 1) for _ in range(NUM_PROMPTS)]
        return [[next(self.first), *tokens] for tokens in rest]

    def send(self, weights: WeightSet, by: str = "") -> None:
        """Send a set, or some tensors of one, as the next version."""
        engine = self.engine
        engine.version += 1
        engine.updates[by or engine.works[-1]].send(list(self.known.tensors(weights)), engine.version)
        self.holds, engine.sent = {**self.holds, **weights}, str(engine.version)

    def ask(self, prompts: Sequence[Sequence[int]] | None = None, adapter: str = "") -> Rows:
        """Sample, and keep the versions that are not the last one that was sent."""
        engine, prompts = self.engine, prompts or self.prompts()
        chunks = engine.ask(prompts, NEW_TOKENS, adapter)
        seen = {"default" if v is None else str(v) for chunk in chunks for v in chunk.versions}
        wrong = sorted({weight_version(engine.server, engine.wire), *seen} - {engine.sent})
        self.labels.append(f"{', '.join(wrong)} after {engine.sent} was loaded" if wrong else "")
        self.logprobs = [np.array(chunk.logprobs) for chunk in chunks]
        return [(prompt, chunk.tokens) for prompt, chunk in zip(prompts, chunks, strict=True)]

    def judge(self, rows: Rows, expected: str, known: Candidates, also: str = "") -> Check:
        """Say whose the log-probs of rows are, by name; that of `also` is no failure either."""
        engine, distances = np.concatenate(self.logprobs), dict[str, float]()
        for key, one in known.items():
            values = one if isinstance(one, list) else self.known.logprobs(rows, one)
            distances[key] = float(np.nanmean(np.abs(np.concatenate(values) - engine)))
        nearest = min(distances, key=lambda key: distances[key])
        held = nearest if distances[nearest] <= self.level else NEITHER
        if sum(distance <= self.level for distance in distances.values()) > 1:
            return Check("undecided", expected, held, distances, "the sets are too near to each other")
        if held in (expected, also):
            return Check("pass", expected, held, distances)
        return Check("fail", expected, held, distances, self.which_tensors(rows, expected, known))

    def which_tensors(self, rows: Rows, expected: str, known: Candidates) -> str:
        """Name the tensors that have values of another set; "" if none explain the log-probs."""
        given = [Completion(*row, found.tolist()) for row, found in zip(rows, self.logprobs, strict=True)]
        mine, wanted = self.known.scorer, known[expected]
        old = load_scorer(self.known.path, mine.model.dtype)
        for key, weights in known.items():
            if key == expected or isinstance(weights, list) or isinstance(wanted, list):
                continue
            self.known.load(weights)
            old.model.load_state_dict(mine.model.state_dict())
            self.known.load(wanted)
            found = find_stale_tensors(mine, old, sequences_from_completions(given), 1.0)
            if found is not None and found.fit.residual <= self.level:
                return f"{found.describe()} as {key}, the rest as {expected}"
        return ""

    def run(self, name: str, check: Callable[[], Check]) -> Check:
        """Run a check from the weights of the model's folder, and add its result."""
        try:
            if is_reachable(self.engine.server) and self.holds != self.known.whole(BEFORE):
                self.send(self.known.whole(BEFORE))
            found = check() if is_reachable(self.engine.server) else Check("undecided", evidence=ENDED)
        except BROKEN as error:
            self.holds = {}  # unknown
            refused = error if isinstance(error, RequestRefused) else error.__cause__
            is_missing = isinstance(refused, RequestRefused) and refused.status in NO_ROUTE
            found = Check("not offered" if is_missing else "fail", evidence=str(error)[:MESSAGE])
        self.checks.append(replace(found, name=name))
        self.report(self.checks[-1])
        return self.checks[-1]

    def all(self) -> None:
        """Run every check but the last one."""
        engine = self.engine
        sound = []
        for by, kind in ((FOLDER, AFTER), (BROADCAST, OTHER)):
            if by not in engine.works:
                self.run(f"full update, {by}", lambda: Check("not offered", evidence=NO_GPU))
            elif self.run(f"full update, {by}", partial(self.full, kind, by)).verdict == "pass":
                sound.append(by)
        engine.works = sound or engine.works
        others: dict[str, Callable[[], Check]] = {
            "partial update": partial(self.chain, FIRST, mixed=FIRST, expected=MIXED),
            "chain": partial(self.chain, FIRST, ("", AFTER, AFTER), mixed=FIRST),
            "chain, dropped part": partial(self.chain, FIRST, LAST, mixed=(AFTER, "", AFTER), expected=MIXED),
            "chain, doubled part": partial(
                self.chain, FIRST, ("", OTHER, ""), ("", AFTER, ""), LAST, mixed=(AFTER, OTHER, AFTER)
            ),
            "aborted update": self.aborted,
            "requests in flight, held": partial(self.in_flight, "in_place"),
            "requests in flight, repeated": partial(self.in_flight, "retract"),
            "prefix cache": self.prefix_cache,
            "sleep and wake": self.sleep,
            "LoRA adapter": self.adapters,
        }
        if sound:
            for name, check in others.items():
                self.run(name, check)
        wrong = list(filter(None, self.labels))
        text = "; ".join([f"{len(self.labels)} times, {len(wrong)} wrong", *wrong[:3]])
        self.run("versions", lambda: Check("fail" if wrong else "pass", evidence=text))

    def full(self, kind: str, by: str = "") -> Check:
        self.send(self.known.whole(kind), by)
        return self.judge(self.ask(), kind, {key: self.known.whole(key) for key in (BEFORE, kind)})

    def parts(self, kinds: Kinds) -> WeightSet:
        """Return a set with one kind for each part of the tensors; "" leaves a part out."""
        listed = self.known.parts()
        return {name: kind for names, kind in zip(listed, kinds, strict=True) for name in names if kind}

    def chain(self, *sent: Kinds, mixed: Kinds, expected: str = AFTER) -> Check:
        """Send parts one after the other; a faulty engine may hold those of `mixed` alone."""
        for kinds in sent:
            self.send(self.parts(kinds))
        known = {kind: self.known.whole(kind) for kind in (BEFORE, AFTER)}
        return self.judge(self.ask(), expected, known | {MIXED: known[BEFORE] | self.parts(mixed)})

    def aborted(self) -> Check:
        """Cut an update to `AFTER`; a full update must succeed then."""
        engine, pool = self.engine, self.engine.pool
        if BROADCAST not in engine.works:
            return Check("not offered", evidence="weights reach this engine through a folder only")
        tensors, own = list(self.known.tensors(self.known.whole(AFTER))), self.known.whole(BEFORE)
        middle = len(tensors) // 2
        engine.version += 1
        engine.broadcast.leave()
        with pool.paused():
            with suppress(RequestRefused):  # versions without sessions have no such route
                pool.post(engine.wire.begin_update())
            group = CutGroup(pool, engine.backend, engine.identity.num_devices, GROUP_S)
            group.broadcast(tensors[:middle], None)
            group.cut(tensors[middle:], LastBucket(engine.version, True))
        self.holds = {}  # unknown
        mixed = own | {name: AFTER for name, _ in tensors[:middle]}
        known: Candidates = {BEFORE: own, MIXED: mixed, AFTER: self.known.whole(AFTER)}
        found = self.judge(self.ask(), BEFORE, known, also=MIXED)
        if found.verdict == "fail" and found.evidence:  # another mixture of whole tensors
            found = replace(found, verdict="pass", held=MIXED)
        self.send(own)
        again = self.judge(self.ask(), BEFORE, known)
        return found if again.verdict == "pass" else again

    def in_flight(self, mode: str) -> Check:
        """Replace the weights under running requests; each token must be of the weights it names."""
        engine, old, new = self.engine, self.known.whole(BEFORE), self.known.whole(AFTER)
        longest = self.known.scorer.model.config.get_text_config().max_position_embeddings
        count = min(LONG_TOKENS, longest - PROMPT_TOKENS)
        for until_s in UNTIL_UPDATE_S:
            if self.holds != old:
                self.send(old)
            prompts, engine.pool.pause_mode = self.prompts(), mode
            try:
                with ThreadPoolExecutor(1) as threads:
                    asked = threads.submit(engine.ask, prompts, count)
                    time.sleep(until_s)
                    self.send(new)
                    chunks = asked.result()
            finally:
                engine.pool.pause_mode = "retract"
            if any(len(chunk.tokens) < count or len({*chunk.versions}) > 1 for chunk in chunks):
                break
        else:
            return Check("undecided", evidence=f"{len(UNTIL_UPDATE_S)} times no request was under way then")
        rows = [(prompt, chunk.tokens) for prompt, chunk in zip(prompts, chunks, strict=True)]
        versions = [np.array(chunk.versions) for chunk in chunks]
        num_old = [int((found != engine.version).sum()) for found in versions]
        kept = [len(prompt) + n - 1 if n else 0 for prompt, n in zip(prompts, num_old, strict=True)]
        is_new = np.concatenate(versions) == engine.version
        reported = np.concatenate([np.array(chunk.logprobs) for chunk in chunks])
        distances = {}
        for key, values, tokens in (
            (f"{BEFORE}, its tokens", self.known.logprobs(rows, old), ~is_new),
            (f"{AFTER}, its tokens", self.known.logprobs(rows, new), is_new),
            (f"{AFTER}, {STALE}", self.known.cached_logprobs(rows, kept, old, new), is_new),
        ):
            apart = np.abs(np.concatenate(values) - reported)[tokens]
            distances[key] = float(apart.mean()) if len(apart) else 0.0
        of_old, *of_new = distances.values()
        num_mixed = sum(0 < n < len(tokens) for n, (_, tokens) in zip(num_old, rows, strict=True))
        keeps = STALE if of_new[1] < of_new[0] else "computed again"
        text = f"{num_mixed} of {len(rows)} requests mix both weights, the later tokens {keeps}"
        if of_old <= self.level and min(of_new) <= self.level:
            return Check("pass", LABELLED, LABELLED, distances, text)
        return Check("fail", LABELLED, NEITHER, distances, text)

    def prefix_cache(self) -> Check:
        prompts, old, new = self.prompts(), self.known.whole(BEFORE), self.known.whole(AFTER)
        for _ in range(2):
            self.ask(prompts)
        self.send(new)
        rows = self.ask(prompts)
        stale = self.known.cached_logprobs(rows, [PROMPT_TOKENS - 1] * len(rows), old, new)
        return self.judge(rows, AFTER, {BEFORE: old, AFTER: new, f"{AFTER}, {STALE}": stale})

    def sleep(self) -> Check:
        engine = self.engine
        if engine.wire is not SGLANG:
            return Check("not offered", evidence="a run of ours never lets vLLM sleep")
        info = json_of(call(engine.server, "GET", "/server_info"))
        if info.get("enable_memory_saver") is False:
            return Check("not offered", evidence="it was started without --enable-memory-saver")
        engine.pool.post(SGLANG.flush_cache())
        engine.pool.post(SGLANG.release_memory())
        self.holds = {}
        for tag in (WEIGHTS, CACHE):
            engine.pool.post(SGLANG.resume_memory(tag))
        return self.full(AFTER)

    def adapters(self) -> Check:
        engine, names = self.engine, list[str]()
        if not engine.identity.serves_adapters:
            return Check("not offered", evidence="it was started without --enable-lora")
        if find_spec("peft") is None:
            return Check("undecided", evidence="adapters need peft here: pip install 'areal-debug[lora]'")
        known = {kind: self.known.whole(kind) for kind in (BEFORE, *ADAPTED)}
        update = AdapterUpdate(engine.pool, engine.folder / "adapter", self.known.adapter, ADAPTER)
        try:
            for kind in ADAPTED:
                engine.version += 1
                update.send(self.known.adapter_tensors(kind), engine.version)
                engine.sent = str(engine.version)
                names.append(adapter_name(ADAPTER, engine.version))
                found = self.judge(self.ask(adapter=names[-1]), kind, known)
                if found.verdict != "pass":
                    break
        finally:
            self.holds = {}
            for name in names:
                with suppress(RequestRefused):
                    engine.pool.post(engine.wire.unload_adapter(name))
        return found

    def restore(self) -> Check:
        """Send the weights of the model's folder, and give them the version from before."""
        engine = self.engine
        self.send(self.known.whole(BEFORE))
        engine.pool.post(engine.wire.set_version(engine.tag))
        engine.sent = engine.tag
        found = self.judge(self.ask(), BEFORE, {key: self.known.whole(key) for key in (BEFORE, AFTER)})
        if self.checksums is not None and engine.checksums() != self.checksums:
            return replace(found, verdict="fail", evidence="its checksums are not those from before")
        return found


@dataclass(frozen=True)
class Result:
    """All checks of an engine; `verdict` is conforms, fails or undecided."""

    engine: str
    model: str
    dtype: str
    noise_floor: float  # mean |D| in nats, of the same weights
    checks: list[Check]

    @property
    def verdict(self) -> str:
        """Fails if a check failed, undecided if one is."""
        seen = {check.verdict for check in self.checks}
        return "fails" if "fail" in seen else "undecided" if "undecided" in seen else "conforms"

    def document(self) -> dict[str, Any]:
        """JSON types."""
        checks = [asdict(check) | TEXTS[check.name] for check in self.checks]
        return {"verdict": self.verdict, **asdict(self), "checks": checks}


def conform(address: str, model: str, report: Callable[[Check], None]) -> Result:
    """Run all checks on the server at an address, which serves the model of a folder.

    Raises:
        EngineError: it does not answer, or has other weights than the folder.
        ModelError: the folder cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="conform-") as scratch:
        engine = Engine(address, model, Path(scratch))
        dtype = engine.identity.dtype if engine.identity.dtype in DTYPES else model_dtype(model)
        known, level = KnownWeights(model, dtype), published_noise((dtype, dtype), False).mean_abs
        run = Conformance(engine, known, level, report)
        rows = run.ask()
        found = run.judge(rows, BEFORE, {BEFORE: known.whole(BEFORE)})
        if found.verdict != "pass":
            raise EngineError(
                f"{engine.server.address} does not hold the weights of {model}: its log-probs are "
                f"{found.distances[BEFORE]:.2g} nats away on average, {level:g} is noise; give the --model that it serves"
            )
        known.set_apart(rows, APART * level)
        # `timeout` and job schedulers send SIGTERM, which would leave the engine with other weights
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        try:
            run.all()
        finally:
            signal.signal(signal.SIGTERM, before)
            run.holds = known.whole(BEFORE)  # it is sent by the check itself
            run.run("weights at the end", run.restore)
            engine.broadcast.close()
    return Result(f"{engine.wire.engine} routes, {engine.identity.version}", model, dtype, level, run.checks)
