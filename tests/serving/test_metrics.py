"""`/metrics` and `/live`: every value against a recount from the requests."""

from __future__ import annotations

import json
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from checkpoint import edit_tensors
from fastapi import FastAPI
from fastapi.testclient import TestClient
from interrupts import RaiseAtLine
from perfect import one_layer_target, perfect_eagle3
from prometheus_client.parser import text_string_to_metric_families as families
from tiny import tiny_model_dir
from torch import Tensor

from trtspec import LLM, EagleDecodingConfig, KvCacheConfig, NGramDecodingConfig, SamplingParams
from trtspec.executor.request import Request
from trtspec.serving.metrics import Histogram, StepMetrics, StepTimes, accepted_per_position
from trtspec.serving.observe import add_observability

ROOT = Path(__file__).parents[2]
K = 3
FORCE = "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS"


class Served(NamedTuple):
    """An engine, its counts and a client of its endpoints."""

    llm: LLM
    metrics: StepMetrics
    client: TestClient

    def values(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """Scrapes. Returns values by name and labels, those that are always the same left out."""
        reply = self.client.get("/metrics")
        assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/plain")
        found = {}
        for family in families(reply.text):
            for sample in family.samples:
                labels = dict(sample.labels)
                if not sample.name.startswith("process_"):
                    assert labels.pop("engine") == "0" and labels.pop("model_name") == "tiny"
                key = sample.name, tuple(sorted(labels.items()))
                assert key not in found
                found[key] = sample.value
        return found

    def value(self, name: str, **labels: str) -> float:
        return self.values()[name, tuple(sorted(labels.items()))]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return one_layer_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def head(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = perfect_eagle3(tmp_path_factory.mktemp("head"), target)
    noise = torch.Generator().manual_seed(0)

    def blur(tensors: dict[str, Tensor]) -> None:  # so that drafts are accepted now and then
        weight = tensors["lm_head.weight"]
        weight += 0.6 * weight.std() * torch.randn(weight.shape, generator=noise)

    edit_tensors(path, blur)
    return path


Serve = Callable[..., Served]


@pytest.fixture
def serve(target: Path, head: Path) -> Iterator[Serve]:
    engines = []

    def start(
        drafter: str | None = "eagle3", plain: Any = None, target: Path = target, **options: Any
    ) -> Served:
        config: Any = None
        if drafter == "eagle3":
            config = EagleDecodingConfig(max_draft_len=K, speculative_model=head)
        elif drafter == "ngram":
            config = NGramDecodingConfig(max_draft_len=K, max_matching_ngram_size=1)
        options = {"max_batch_size": 4, "max_seq_len": 96, "max_num_tokens": 48} | options
        llm = LLM(target, config, device="cpu", dtype="float32", **options)
        engines.append(llm)
        app = FastAPI()
        engine: Any = llm if drafter == "ngram" else SimpleNamespace(llm=llm)
        metrics = add_observability(app, engine, "tiny", plain_step_seconds=plain)
        llm.executor.record_steps = True
        return Served(llm, metrics, TestClient(app))

    yield start
    for llm in engines:
        llm.shutdown()


def run(served: Served) -> list[Request]:
    """Runs requests of several kinds: greedy, sampled, cancelled, with one prompt twice."""
    executor = served.llm.executor
    requests = []
    for i in range(7):
        params = SamplingParams(
            max_tokens={2: 45, 5: 1}.get(i, 9 + 4 * i), temperature=float(i % 2), seed=i,
            ignore_eos=i != 3, stop_token_ids=[i] if i == 4 else None,
        )  # fmt: skip
        requests.append(executor.enqueue([5, 6, 7, 5, 6, 7 + i % 3] * (2 + i % 2), params))
    for _ in range(5):
        executor.step()
    assert executor.cancel(requests[2].request_id)
    requests.append(executor.enqueue(requests[0].prompt_token_ids * 2, SamplingParams(4)))
    executor.run_until_done()
    return requests


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "overlap", "options"),
    [
        ("eagle3", True, {}),
        ("eagle3", False, {"enable_chunked_prefill": True, "max_num_tokens": 16}),
        ("ngram", True, {"enable_chunked_prefill": True, "max_num_tokens": 16}),
        (None, True, {}),
    ],
)
def test_values_are_those_of_a_recount(
    serve: Serve, drafter: str | None, overlap: bool, options: dict[str, Any]
) -> None:
    served = serve(drafter, disable_overlap_scheduler=not overlap, **options)
    requests = run(served)
    values = served.values()

    def value(name: str, **labels: str) -> float:
        return values[name, tuple(sorted(labels.items()))]

    prompts = sum(len(r.prompt_token_ids) for r in requests if r.output_token_ids)
    outputs = sum(len(request.output_token_ids) for request in requests)
    assert value("vllm:prompt_tokens_total") == prompts
    assert value("vllm:generation_tokens_total") == outputs
    reasons = Counter(request.finish_reason for request in requests)
    assert reasons["cancelled"] == 1 and reasons["length"] >= 5
    for ours, theirs in (("stop", "stop"), ("length", "length"), ("cancelled", "abort")):
        assert value("vllm:request_success_total", finished_reason=theirs) == reasons[ours]
    assert value("vllm:request_success_total", finished_reason="error") == 0
    assert value("vllm:num_requests_running") == value("vllm:num_requests_waiting") == 0
    assert value("vllm:kv_cache_usage_perc") == 0
    statistics = served.llm.stats()
    cache = statistics.prefix_cache
    assert value("vllm:prefix_cache_queries_total") == cache.queried_tokens > 0
    assert value("vllm:prefix_cache_hits_total") == cache.hit_tokens

    steps = sum(request.num_steps for request in requests)
    counts = {
        "vllm:time_to_first_token_seconds": sum(bool(r.output_token_ids) for r in requests),
        "vllm:inter_token_latency_seconds": steps,
        "vllm:e2e_request_latency_seconds": len(requests),
        "vllm:request_queue_time_seconds": len(requests),
        "vllm:request_prompt_tokens": len(requests),
        "vllm:request_generation_tokens": len(requests),
    }
    for name, count in counts.items():
        assert value(f"{name}_count") == value(f"{name}_bucket", le="+Inf") == count, name
    assert value("vllm:request_generation_tokens_sum") == outputs
    assert value("vllm:iteration_tokens_total_sum") == prompts + outputs
    by_kind = Counter[str]()
    for (name, labels), count in values.items():
        if name == "trtspec:step_seconds_count":
            assert dict(labels)["run"] == "eager"
            by_kind[dict(labels)["kind"]] += int(count)
    assert by_kind["generation"] and by_kind["context"] + by_kind["mixed"]

    drafted = value("trtspec:output_tokens_total", source="draft")
    assert drafted + value("trtspec:output_tokens_total", source="target") == outputs
    if drafter is None:
        assert not any("spec_decode" in name for name, _ in values) and drafted == 0
        return
    lens: Counter[int] = sum((request.accepted_lens for request in requests), Counter())
    per_position = [sum(c for n, c in lens.items() if n > i) for i in range(K)]
    assert [
        value("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(i))
        for i in range(K)
    ] == per_position and per_position[0] > per_position[-1] > 0
    accepted = value("vllm:spec_decode_num_accepted_tokens_total")
    assert accepted == sum(per_position) and 0 <= accepted - drafted <= K * len(requests)
    drafts = value("vllm:spec_decode_num_drafts_total")
    asked = value("vllm:spec_decode_num_draft_tokens_total")
    proposed = [step.proposed for request in requests for step in request.steps or ()]
    if drafter == "eagle3":
        assert drafts == steps and asked == sum(proposed)
    else:  # a request that found no drafts counts, where another found some
        assert sum(p > 0 for p in proposed) <= drafts <= steps
        assert sum(proposed) <= asked <= K * drafts
    assert statistics.acceptance_per_position == pytest.approx([n / steps for n in per_position])


def test_a_preempted_request_counts_once(serve: Serve, tmp_path: Path) -> None:
    cache = KvCacheConfig(max_tokens=64, tokens_per_block=4)
    served = serve("ngram", target=tiny_model_dir(tmp_path), kv_cache_config=cache)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    outputs = served.llm.generate([[i, 4, 5, 6] for i in range(4)], params)
    assert served.value("vllm:num_preemptions_total") == served.llm.stats().num_preemptions > 0
    for name in ("time_to_first_token_seconds", "request_queue_time_seconds"):
        assert served.value(f"vllm:{name}_count") == len(outputs)
    assert served.value("vllm:prompt_tokens_total") == 4 * len(outputs)
    assert served.value("vllm:prefix_cache_queries_total") == 4 * len(outputs)
    assert served.value("vllm:generation_tokens_total") == 24 * len(outputs)


def test_gauges_follow_the_engine(serve: Serve) -> None:
    served = serve(max_batch_size=2)
    executor = served.llm.executor
    for _ in range(5):
        executor.enqueue([1, 2, 3], SamplingParams(max_tokens=40, ignore_eos=True))
    assert served.value("vllm:num_requests_waiting") == 5
    for _ in range(3):
        executor.step()
    assert served.value("vllm:num_requests_running") == 2
    assert served.value("vllm:num_requests_waiting") == 3
    assert 0 < served.value("vllm:kv_cache_usage_perc") < 1
    assert served.value("trtspec:runtime_draft_len") == served.value("trtspec:max_draft_len") == K
    executor.runtime_draft_len = 0
    assert served.value("trtspec:runtime_draft_len") == 0
    executor.step()
    assert served.value("trtspec:draft_len") == 0


def test_times_are_those_of_the_clock(serve: Serve) -> None:
    served = serve()
    served.llm.generate([1, 2], SamplingParams(max_tokens=2))  # warm
    before = served.values()
    started = time.perf_counter()
    out = served.llm.generate([3, 4, 5], SamplingParams(max_tokens=30, ignore_eos=True))
    took = time.perf_counter() - started
    after = served.values()

    def grew(name: str) -> float:
        return after[name, ()] - before[name, ()]

    e2e, first = (grew(f"vllm:{name}_seconds_sum") for name in
                  ("e2e_request_latency", "time_to_first_token"))  # fmt: skip
    assert 0 < first < e2e <= took
    parts = [grew(f"vllm:request_{part}_time_seconds_sum") for part in ("prefill", "decode")]
    assert sum(parts) == pytest.approx(grew("vllm:request_inference_time_seconds_sum"))
    assert grew("vllm:request_queue_time_seconds_sum") + sum(parts) <= e2e
    assert grew("vllm:inter_token_latency_seconds_sum") == pytest.approx(parts[1])
    mean = grew("vllm:request_time_per_output_token_seconds_sum")
    assert mean == pytest.approx(parts[1] / (len(out.outputs[0].token_ids) - 1))


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text",
        "application/openmetrics-text;version=1.0.0;escaping=underscores;q=0.5,*/*;q=0.1",
        "text/plain;version=1.0.0;escaping=allow-utf-8",
    ],
)
def test_names_keep_their_colon_whatever_is_accepted(serve: Serve, accept: str) -> None:
    reply = serve().client.get("/metrics", headers={"Accept": accept})
    names = {family.name for family in families(reply.text)}
    assert {"vllm:generation_tokens", "vllm:spec_decode_num_drafts", "trtspec:step_seconds"} < names
    assert not any(name.startswith("vllm_") for name in names)


def test_on_a_gpu_a_step_lasts_from_one_reading_to_the_next(serve: Serve) -> None:
    """What the host does between two calls is part of it, but no time without requests."""
    served = serve(disable_overlap_scheduler=False)
    executor = served.llm.executor
    served.llm.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))  # warm
    executor._watch.runs_at_launch = False  # as on a GPU
    served.metrics.step_seconds.clear()
    started = time.perf_counter()
    executor.enqueue([1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True))
    calls = 0
    while executor.has_work:
        executor.step()
        time.sleep(0.01)
        calls += 1
    took = time.perf_counter() - started
    times = list(served.metrics.step_seconds.values())
    count = sum(sum(histogram.counts) for histogram in times)
    assert 0.01 * (count - 1) <= sum(histogram.total for histogram in times) <= took
    assert calls - 2 <= count < calls, "the first call reads nothing"
    idle = sum(histogram.total for histogram in times)
    time.sleep(0.3)
    executor.enqueue([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))
    executor.run_until_done()
    assert sum(histogram.total for histogram in times) - idle < 0.3


def test_two_engines_share_nothing(serve: Serve) -> None:
    one, other = serve(), serve("ngram")
    run(one)
    assert other.value("vllm:generation_tokens_total") == 0
    assert one.value("vllm:generation_tokens_total") > 0


def test_an_observer_that_raises_is_dropped(serve: Serve, caplog: Any) -> None:
    served = serve()
    served.metrics.on_step = lambda facts: 1 / 0  # type: ignore[method-assign]
    with caplog.at_level(logging.ERROR):
        requests = run(served)
    assert all(request.is_finished for request in requests)
    assert caplog.text.count("The observer of steps raised") == 1
    assert served.llm.executor.observer is None
    served.llm.executor.observer = None
    run(served)


@pytest.mark.slow
def test_every_request_is_counted_once_whatever_interrupts_a_step(serve: Serve) -> None:
    served = serve("ngram")
    executor = served.llm.executor
    run(served)
    with RaiseAtLine(None, KeyboardInterrupt) as trace:
        run(served)
    places = [place for place in trace.seen if not place[0].endswith("observer.py")][::30]
    finished = sum(served.metrics.finished.values())
    for place in places:
        requests = []
        try:
            with RaiseAtLine(place, KeyboardInterrupt):
                for _ in range(3):
                    requests.append(executor.enqueue([5, 6, 5, 6], SamplingParams(max_tokens=6)))
                executor.run_until_done()
        except KeyboardInterrupt:
            executor.run_until_done()
        live = [r for r in requests if r.finish_reason]
        counted = sum(served.metrics.finished.values()) - finished
        # A request may be queued although `enqueue` raised after that.
        assert len(live) <= counted <= 3, place
        finished += counted
    assert not served.metrics._timelines or len(served.metrics._timelines) <= len(places)


# -- the page's figures ------------------------------------------------------------------------


def test_live_state_sums_to_the_counters(serve: Serve) -> None:
    served = serve()
    run(served)
    state = served.client.get("/live").json()
    history = state["history"]
    assert sum(s["generated_tokens"] for s in history) == state["generated_tokens"]
    assert sum(s["prompt_tokens"] for s in history) == state["prompt_tokens"]
    columns = zip(*(s["accepted_lens"] for s in history), strict=True)
    assert [sum(column) for column in columns] == state["accepted_lens"]
    assert len(state["accepted_lens"]) == K + 1 == state["max_draft_len"] + 1
    assert state["model"] == "tiny" and state["mode"] == "EAGLE3_ONE_MODEL"
    assert (state["running"], state["waiting"], state["forced_acceptance"]) == (0, 0, None)
    assert state["drafter_is_dead"] is False
    now = state["now"]
    assert served.client.get("/live", params={"since": now + 5}).json()["history"] == []
    for bad in ("-1", "x", "1e400", str(1 << 70)):
        assert served.client.get("/live", params={"since": bad}).status_code == 422


def test_a_speed_up_is_estimated_from_measured_steps_only(serve: Serve) -> None:
    served = serve(plain={2: 0.5})
    executor = served.llm.executor
    assert served.client.get("/live").json()["speed"] is None
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    served.llm.generate([1, 2, 3], params)
    speed = served.client.get("/live").json()["speed"]
    assert speed["batch"] == 1 and speed["speculative_seconds"] > 0
    assert speed["plain_seconds"] is speed["speed_up"] is None
    executor.runtime_draft_len = 0
    served.llm.generate([1, 2, 3], params)
    executor.runtime_draft_len = K
    served.llm.generate([1, 2, 3], params)
    speed = served.client.get("/live").json()["speed"]
    assert not speed["plain_is_given"] and speed["speed_up"] == pytest.approx(
        speed["acceptance_length"] * speed["plain_seconds"] / speed["speculative_seconds"]
    )
    served.llm.generate([[1, 2, 3], [4, 5, 6]], params)
    served.metrics.step_times.last_batch = 2  # one may have ended first
    speed = served.client.get("/live").json()["speed"]
    assert (speed["batch"], speed["plain_seconds"], speed["plain_is_given"]) == (2, 0.5, True)


def test_without_a_drafter_there_is_no_speed_up(serve: Serve) -> None:
    served = serve(None)
    served.llm.generate([1, 2, 3], SamplingParams(max_tokens=9))
    assert served.client.get("/live").json()["speed"] is None


def test_warnings_of_forced_acceptance_and_a_dead_drafter(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FORCE, "2")
    served = serve()
    monkeypatch.delenv(FORCE)
    assert served.value("trtspec:forced_acceptance") == 2
    assert served.value("trtspec:cuda_graphs") == 0  # on a CPU
    assert served.client.get("/live").json()["forced_acceptance"] == 2
    watch = served.llm.executor.dead_drafter_watch
    watch.see([False] * watch.window)
    assert served.value("trtspec:drafter_is_dead") == 1
    assert served.client.get("/live").json()["drafter_is_dead"] is True


# -- parts -------------------------------------------------------------------------------------


def test_a_bucket_holds_values_up_to_its_bound() -> None:
    histogram = Histogram((1.0, 2.0, 5.0))
    for value, times in ((0.5, 1), (1.0, 2), (1.5, 1), (5.0, 1), (6.0, 3)):
        histogram.add(value, times)
    assert histogram.counts == [3, 1, 1, 3] and histogram.cumulative() == [3, 4, 5, 8]
    assert histogram.total == pytest.approx(0.5 + 2 + 1.5 + 5 + 18)


def test_accepted_per_position() -> None:
    assert accepted_per_position([4, 3, 2, 1]) == [6, 3, 1]
    assert accepted_per_position([7]) == []


def test_step_times_are_by_batch_size_and_typical() -> None:
    times = StepTimes()
    for batch, drafts, seconds in ((3, 2, 1.0), (4, 2, 3.0), (4, 2, 90.0), (1, 0, 0.5)):
        for _ in range(3):
            times.add(batch, drafts, seconds)
    assert times.last_batch == 1
    assert times.typical(times.speculative) == {4: 3.0}
    assert times.typical(times.plain) == {}  # three are too few


# -- the dashboard -----------------------------------------------------------------------------


def test_the_dashboard_shows_metrics_that_exist(serve: Serve) -> None:
    text = (ROOT / "examples" / "grafana" / "trtspec.json").read_text("utf-8")
    board = json.loads(text)
    served = serve()
    run(served)
    names = {name for name, _ in served.values()}
    named = set(re.findall(r"(?:vllm|trtspec):\w+", text))  # in variables and titles too
    assert len(named) > 20 and named <= names, named - names
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 10
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["type"] in ("stat", "timeseries") and panel["title"]
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24
        taken |= cells
        assert panel["targets"] and panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            query = target["expr"]
            used = re.findall(r"(?:vllm|trtspec):\w+", query)
            assert used and set(used) <= names, set(used) - names
            assert query.count("(") == query.count(")") and query.count("{") == query.count("}")
    variables = {variable["name"] for variable in board["templating"]["list"]}
    assert variables == {"datasource", "model"}
    assert board["schemaVersion"] >= 36 and board["uid"] and board["time"]["from"]
