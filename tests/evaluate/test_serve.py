"""The vLLM server as Eyas starts, asks and ends it, with a stand-in for vLLM; tests/export/test_serving_in_vllm.py has the real one."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MEMORY_FAULT, SOURCE, Outcome
from fake_vllm import IN_USE, fake_python

import eyas.evaluate.serve
from eyas.config import RunConfig, TargetSection, load
from eyas.errors import UserError
from eyas.evaluate.prompts import Prompt
from eyas.evaluate.report import report
from eyas.evaluate.run import evaluation_dtype, settings
from eyas.evaluate.serve import Server, flags, free_port, read_counters, server_arguments
from eyas.evaluate.served import PARTS, Parts, plan_passes, serve_passes, summarise
from eyas.evaluate.simulate import Acceptance
from eyas.progress import Reporter
from eyas.stage import Context
from eyas.target.spec import read_spec

METRICS = """\
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts{suffix}{{engine="0",model_name="a {{b}}"}} 30.0
vllm:spec_decode_num_drafts{suffix}{{engine="1",model_name="a {{b}}"}} 10.0
vllm:spec_decode_num_drafts_created{{engine="0",model_name="a"}} 1.7e+09
vllm:spec_decode_num_draft_tokens{suffix}{{engine="0"}} 80.0
vllm:spec_decode_num_accepted_tokens{suffix}{{engine="0",model_name="a"}} 25.0
vllm:spec_decode_num_accepted_tokens_per_pos{suffix}{{engine="0",model_name="a",position="0"}} 20.0
vllm:spec_decode_num_accepted_tokens_per_pos{suffix}{{engine="1",model_name="a",position="0"}} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos{suffix}{{engine="0",model_name="a",position="1"}} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{{engine="0",model_name="a",position="1"}} 1.7e+09
"""
PROMPTS = [Prompt("code/a", "code", [5, 10]), Prompt("math/b", "math", [5, 20]), Prompt("code/c", "code", [5, 30])]


@pytest.mark.parametrize("suffix", ["", "_total"])
def test_counters_are_read_under_both_names_and_summed_over_engines(suffix: str) -> None:
    found = read_counters(METRICS.format(suffix=suffix), 2)
    assert found == Acceptance(40, (40, 24), (24, 6))
    assert found.length == 1.75 and found.survival == [0.6, 0.15] and found.per_position == [0.6, 0.25]


def test_a_server_that_counts_no_drafts_is_told_from_one_that_made_none() -> None:
    assert read_counters("vllm:num_requests_running 0.0\n", 2) is None
    assert read_counters('vllm:spec_decode_num_drafts_total{engine="0"} 0.0\n', 2) == Acceptance(0, (0, 0), (0, 0))


def test_extra_arguments_become_flags() -> None:
    arguments = {"enforce_eager": True, "async_scheduling": False, "kv_cache_memory_bytes": 1 << 30, "hf_overrides": {"a": [1]}, "sizes": [1, 2]}
    words = flags(arguments)
    assert words[:4] == ["--enforce-eager", "--no-async-scheduling", "--kv-cache-memory-bytes", "1073741824"]
    assert words[4:] == ["--hf-overrides", '{"a": [1]}', "--sizes", "1", "2"]


def test_extra_changes_what_it_may_and_nothing_that_the_measurement_rests_on() -> None:
    extra = {"max_model_len": 99, "enable_prefix_caching": True, "host": "0.0.0.0", "disable_log_stats": True, "speculative_config": {"method": "ngram"}}
    found = server_arguments(TargetSection(path="m", extra=extra), Path("m"), "float32", 50)
    assert found["max_model_len"] == 99 and found["enable_prefix_caching"] is False
    assert not {"host", "disable_log_stats", "speculative_config", "trust_remote_code"} & found.keys()
    drafted = server_arguments(TargetSection(path="m", trust_remote_code=True), Path("m"), "float32", 50, Path("d"), 4)
    assert drafted["speculative_config"] == {"method": "eagle3", "model": "d", "num_speculative_tokens": 4} and drafted["trust_remote_code"] is True


def server(python: str | Path, folder: Path) -> Server:
    return Server(str(python), {"model": "m"}, folder / "server.log", lambda line: None)


def test_a_server_that_dies_at_once_is_one_sentence_that_names_its_log(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error, server(sys.executable, tmp_path):
        pass
    assert "No module named" in str(error.value) and str(tmp_path / "server.log") in str(error.value) and "run the same command again" in str(error.value)


def test_a_python_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"target\.python = '/none/python' cannot be started"), server("/none/python", tmp_path):
        pass


@pytest.mark.parametrize("fault", [IN_USE, MEMORY_FAULT])
def test_a_server_whose_port_was_taken_meanwhile_is_started_on_another(fault: str, tmp_path: Path) -> None:
    """And one that could not measure its memory is started again."""
    with server(fake_python(tmp_path, die=2, fault=fault), tmp_path) as running:
        assert running.version == "0.0.fake" and running.complete([5, 7], 3, [], 0.0) == [8, 9, 10]
    assert (tmp_path / "starts.txt").read_text().split() == ["plain"] * 3
    with pytest.raises(ConnectionRefusedError):
        http.client.HTTPConnection("127.0.0.1", running.port).request("GET", "/health")
    with pytest.raises(UserError, match=f"3 times: RuntimeError: {re.escape(fault[:40])}"), server(fake_python(tmp_path, die=99, fault=fault), tmp_path):
        pass


def test_another_server_that_answers_on_the_port_is_not_mistaken_for_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stranger(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"data": [{"id": "stranger"}]}')

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Stranger) as stranger:
        threading.Thread(target=stranger.serve_forever, daemon=True).start()
        ports = iter([stranger.server_port, free_port()])
        monkeypatch.setattr(eyas.evaluate.serve, "free_port", lambda: next(ports))
        with server(fake_python(tmp_path), tmp_path) as running:
            assert running.port != stranger.server_port and running.complete([5, 7], 1, [], 0.0) == [8]
        stranger.shutdown()


def test_a_server_ends_with_the_process_that_wants_it_even_if_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from eyas.evaluate.serve import Server\n"
        "with Server(sys.argv[1], {'model': 'm'}, Path(sys.argv[2]), lambda line: None) as server:\n"
        "    print(server.port, flush=True); time.sleep(60)"
    )
    words = [sys.executable, "-c", code, str(fake_python(tmp_path)), str(tmp_path / "log")]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": SOURCE})
    assert process.stdout is not None
    port = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.wait()
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            http.client.HTTPConnection("127.0.0.1", port, timeout=5).request("GET", "/health")
        except OSError:
            return
        time.sleep(0.1)
    pytest.fail("the server outlived the process that started it")


def test_every_slot_gets_two_requests_and_one_at_a_time_is_always_measured() -> None:
    passes = plan_passes(PROMPTS, [4, 2, 4])
    assert [(each.name, each.concurrency, len(each.prompts)) for each in passes] == [("1 code", 1, 2), ("1 math", 1, 1), ("2", 2, 4), ("4", 4, 8)]
    assert [prompt.id for prompt in passes[0].prompts] == ["code/a", "code/c"]
    assert [prompt.id for prompt in passes[2].prompts] == ["code/a", "math/b", "code/c", "code/a"]


@pytest.fixture
def context(make_run: Callable[..., Path], tmp_path: Path, tiny_target: Path) -> Callable[..., Context]:
    """context(behaviour...) is that of a served evaluation by the stand-in."""

    def make(**behaviour: Any) -> Context:
        python = fake_python(tmp_path, **behaviour)
        config = load(make_run(target={"python": str(python)}, evaluate={"engine": "vllm", "concurrency": [2], "max_new_tokens": 6}), [])
        folder = tmp_path / "evaluate"
        folder.mkdir(exist_ok=True)
        return Context(config, read_spec(tiny_target), tmp_path, folder, Reporter(tmp_path))

    return make


def serve(context: Context) -> tuple[Parts, dict[str, Any]]:
    parts = serve_passes(context, PROMPTS, frozenset({2}), torch.float32)
    return parts, summarise(PROMPTS, context.config.evaluate, parts)


def test_a_served_evaluation_counts_what_the_server_counted_without_its_warming_up(context: Callable[..., Context]) -> None:
    parts, summary = serve(context())
    assert summary["rounds"] == 2 * len(PROMPTS), "two rounds an answer; the first answer, which warms up, is not counted"
    assert summary["acceptance_length"] == 2.5 and summary["survival"] == [1, 0.5, 0] and summary["per_position"] == [1, 0.5, 0]
    assert summary["num_tokens"] == 6 * len(PROMPTS) and summary["num_identical"] == 3 and summary["greedy_identical"]
    assert summary["vllm_version"] == "0.0.fake" and summary["by_category"]["code"]["num_prompts"] == 2
    assert [(level["concurrency"], level["num_answers"]) for level in summary["concurrency"]] == [(1, 3), (2, 4)]
    assert all(level["speedup"] == level["tokens_per_second"] / level["plain_tokens_per_second"] for level in summary["concurrency"])
    assert parts["plain 1 math"]["answers"] == [[21, 22, 23, 24, 25, 26]]


def test_finished_parts_are_not_served_again(context: Callable[..., Context], tmp_path: Path) -> None:
    work = context()
    _, whole = serve(work)
    path, starts = work.folder / PARTS, tmp_path / "starts.txt"
    lines = path.read_bytes().splitlines(keepends=True)
    assert starts.read_text().split() == ["draft", "plain"] and len(lines) == 7
    path.write_bytes(b"".join(lines[:4]) + lines[4][:20])  # interrupted while the plain server's second part was written
    serve(work)
    assert starts.read_text().split() == ["draft", "plain", "plain"]
    assert path.read_bytes().splitlines(keepends=True)[:4] == lines[:4]
    _, again = serve(work)
    assert starts.read_text().split() == ["draft", "plain", "plain"], "all is there: no server is started"
    assert again["rounds"] == whole["rounds"] and again["acceptance_length"] == whole["acceptance_length"]


@pytest.mark.parametrize(
    ("best", "gap", "rounding"),
    [({22: -0.7, 250: -0.7004}, 4e-4, True), ({250: -0.3, 22: -1.3}, 1.0, False), ({22: -0.1, 77: -3.0}, None, False)],
)
def test_where_texts_part_a_near_tie_is_told_from_a_fault(best: dict[int, float], gap: float | None, rounding: bool, context: Callable[..., Context]) -> None:
    _, summary = serve(context(parting={20: 250}, best=best))
    assert summary["num_identical"] == 2 and not summary["greedy_identical"]
    (entry,) = summary["prompts_that_differ"]
    assert entry["id"] == "math/b" and entry["position"] == 1 and entry["rounding"] is rounding
    assert entry["gap_nats"] == (None if gap is None else pytest.approx(gap))
    assert summary["by_category"]["code"]["greedy_identical"] and summary["by_category"]["math"]["num_identical"] == 0


@pytest.mark.parametrize(("simulated", "warned"), [(2.5, False), (2.44, False), (2.4, True), (2.6, True)])
def test_a_served_acceptance_that_the_features_do_not_give_is_warned_of(simulated: float, warned: bool, context: Callable[..., Context]) -> None:
    work = context(parting={20: 250}, best={22: -0.7, 77: -0.9})
    _, summary = serve(work)
    common = {"num_draft_tokens": 3, "sampling": "greedy", "dtype": "float32", "prompts_seen_in_training": []}
    found = [{"as_if": "there were no d2t", "acceptance_length": 2.5, "distance": 0.0}]
    report({**common, **summary, "simulated_acceptance_length": simulated, "misread": found}, work)
    said = work.reporter.log.read_text()
    assert ("warning: vLLM 0.0.fake served an acceptance length of 2.500 where" in said) is warned
    assert ("It serves as if there were no d2t (which gives 2.500)" in said) is warned
    assert "math/b: the texts part at token 1 of the answer, and the token there with the draft is not among the two" in said


def test_a_run_whose_draft_was_served_is_done_and_holds_both_acceptances(make_run: Callable[..., Path], tmp_path: Path, eyas: Callable[..., Outcome]) -> None:
    evaluate = {"engine": "vllm", "concurrency": [2], "prompts_per_category": 3}
    run_file = make_run(target={"python": str(fake_python(tmp_path))}, train={"epochs": 1}, evaluate=evaluate)
    outcome = eyas("run", run_file)
    assert outcome.code == 0 and "served by vLLM 0.0.fake one at a time" in outcome.out and "Answers at once" in outcome.out, outcome.err
    summary = json.loads((tmp_path / "runs" / "run" / "evaluate" / "summary.json").read_text())
    assert summary["engine"] == "vllm" and summary["dtype"] == "float32" and summary["num_prompts"] == 3
    assert summary["acceptance_length"] == 2.5 and 1 <= summary["simulated_acceptance_length"] < 2.5
    assert "warning: vLLM 0.0.fake served" in outcome.err, "the stand-in counts what no draft did"
    assert "No mistake that engines are known to make explains it" in outcome.err and summary["misread"] == []
    assert "nothing to do" in eyas("run", run_file).err
    assert (tmp_path / "starts.txt").read_text().split() == ["draft", "plain"]


def test_each_engine_has_its_own_default_precision(context: Callable[..., Context]) -> None:
    def config(*sets: tuple[str, Any]) -> RunConfig:
        found = context().config.model_dump()
        for name, value in sets:
            section, key = name.split(".")
            found[section][key] = value
        return RunConfig.model_validate(found)

    assert evaluation_dtype(config(("target.dtype", "bfloat16"))) == torch.bfloat16
    assert evaluation_dtype(config(("target.dtype", "bfloat16"), ("evaluate.engine", "transformers"))) == torch.float32
    assert evaluation_dtype(config(("target.dtype", "bfloat16"), ("evaluate.dtype", "float32"))) == torch.float32


@pytest.mark.parametrize(("instructions", "dtype"), [("amx_bf16", torch.bfloat16), ("avx512_bf16", torch.float32)])
def test_auto_precision_in_this_process_is_one_in_which_texts_do_not_part(
    instructions: str, dtype: torch.dtype, context: Callable[..., Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {instructions: True}, raising=False)
    config = context().config
    evaluate = config.evaluate.model_copy(update={"engine": "transformers", "dtype": "auto"})
    assert evaluation_dtype(config.model_copy(update={"evaluate": evaluate})) == dtype
    assert evaluation_dtype(config.model_copy(update={"evaluate": evaluate.model_copy(update={"engine": "vllm"})})) == torch.bfloat16


def test_settings_of_the_server_matter_only_where_there_is_one(context: Callable[..., Context]) -> None:
    served = context()
    other = served.config.model_copy(update={"evaluate": served.config.evaluate.model_copy(update={"engine": "transformers"})})
    assert settings(served.config, served.spec)["evaluate"]["concurrency"] == [1, 2] and "server" in settings(served.config, served.spec)
    assert not {"engine", "concurrency"} & settings(other, served.spec)["evaluate"].keys() and "server" not in settings(other, served.spec)
