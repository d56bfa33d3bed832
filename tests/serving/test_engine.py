"""The engine: slices and batches change nothing but the order of work."""

import time
from dataclasses import replace
from queue import Queue
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from proximo.models import prompt_tokens
from proximo.samplers.embedded import local_sampler
from proximo.samplers.sampler import SamplingOptions
from proximo.serving.engine import ServingEngine, next_batch
from proximo.serving.logprobs import prompt_logprobs, token_logprobs
from proximo.serving.queue import CompletionJob, CompletionPiece, CompletionRequest
from proximo.types import Request

GREEDY, WARM = SamplingOptions(temperature=0.0), SamplingOptions(temperature=1.0)


def completed(engine: ServingEngine, *asked: CompletionRequest) -> list[tuple[CompletionJob, list[CompletionPiece]]]:
    """The jobs, submitted together, with their pieces."""
    queues: list[Queue[CompletionPiece]] = [Queue() for _ in asked]
    jobs = [CompletionJob(each, queue.put) for each, queue in zip(asked, queues, strict=True)]
    engine.submit(*jobs)
    found = []
    for job, queue in zip(jobs, queues, strict=True):
        pieces = [queue.get(timeout=60)]
        while pieces[-1].finish is None and pieces[-1].error is None:
            pieces.append(queue.get(timeout=60))
        found.append((job, pieces))
    return found


def ask(engine: ServingEngine, text: str, **changes) -> CompletionRequest:
    return replace(CompletionRequest(prompt_tokens(engine.tokenizer, text), GREEDY, max_tokens=8, key=1), **changes)


def test_greedy_tokens_are_those_of_transformers_and_of_chat(served, engine, tmp_path):
    model, tokenizer = served
    prompts = ["12+7=", "3", "999-1="]
    model.save_pretrained(tmp_path)
    generate: Any = Qwen3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).generate  # pyright: ignore
    found = completed(engine, *(ask(engine, text, key=number) for number, text in enumerate(prompts)))
    for number, (text, (job, pieces)) in enumerate(zip(prompts, found, strict=True)):
        ids = torch.tensor([prompt_tokens(tokenizer, text)])
        expected = generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        assert job.tokens == expected[0, ids.shape[1] :].tolist()
        options = replace(GREEDY, max_tokens=8)
        [[chat]] = local_sampler(model, tokenizer).sample(
            [Request(number, tuple(ids[0].tolist()), 1)], options, seed=0, step=0
        )
        assert job.tokens == list(chat.tokens)
        assert "".join(piece.text for piece in pieces) == chat.text
        assert pieces[-1].finish == chat.finish


def test_a_seed_gives_the_same_tokens_alone_and_among_others(engine):
    asked = ask(engine, "1+2=", options=WARM, max_tokens=10, key=7)
    [(alone, _)] = completed(engine, asked)
    others = [ask(engine, f"{n}-1=", options=WARM, max_tokens=2 + 3 * n, key=n) for n in range(6)]
    [*_, (among, _)] = completed(engine, *others, ask(engine, "5", key=9), asked)
    assert among.tokens == alone.tokens
    [(other, _), (sample, _)] = completed(engine, replace(asked, key=8), replace(asked, sample=1))
    assert alone.tokens not in (other.tokens, sample.tokens)


def test_the_first_slice_draws_as_the_sampler_does(served, engine):
    model, tokenizer = served
    [(job, _)] = completed(engine, ask(engine, "1+2=", options=WARM, max_tokens=3, key=5))
    request = Request(5, prompt_tokens(tokenizer, "1+2="), 1)
    [[expected]] = local_sampler(model, tokenizer).sample([request], replace(WARM, max_tokens=3), seed=0, step=0)
    assert job.tokens == list(expected.tokens)


def test_completions_end_at_stop_strings_tokens_and_limits(engine):
    [(whole, pieces)] = completed(engine, ask(engine, "12+7=", options=WARM, max_tokens=12, key=3))
    text = "".join(piece.text for piece in pieces)
    assert len(text) == len(whole.tokens) == 12  # a letter a token
    stop = text[4:7]  # across the first slices
    asked = ask(engine, "12+7=", options=WARM, max_tokens=12, key=3)
    [(job, pieces)] = completed(engine, replace(asked, stop=(stop,)))
    assert "".join(piece.text for piece in pieces) == text[: text.index(stop)]
    assert pieces[-1].finish == "stop"
    assert job.tokens == whole.tokens[: text.index(stop) + 3]
    [(job, pieces)] = completed(engine, replace(asked, end_tokens=frozenset({whole.tokens[5]})))
    assert job.tokens == whole.tokens[: whole.tokens.index(whole.tokens[5]) + 1]
    assert pieces[-1].finish == "stop"
    [(job, pieces)] = completed(engine, replace(asked, max_tokens=5))
    assert (job.tokens, pieces[-1].finish) == (whole.tokens[:5], "length")


def test_logprobs_are_those_of_the_model(served, engine):
    model, tokenizer = served
    asked = ask(engine, "12+7=", top=2, prompt_logprobs=True, max_tokens=7)
    [(job, pieces)] = completed(engine, asked)
    found = [each for piece in pieces for each in piece.logprobs]
    tokens = [*asked.prompt, *job.tokens]
    assert [each.token for each in found] == tokens
    assert found[0].logprob is None
    for end in range(1, len(tokens)):
        [[expected]] = local_sampler(model, tokenizer).sample(
            [Request(0, tuple(tokens[:end]), 1)], SamplingOptions(max_tokens=1), seed=0, step=0
        )
        by_token = dict(found[end].top)
        if expected.tokens[0] in by_token:
            assert by_token[expected.tokens[0]] == pytest.approx(expected.logprobs[0], abs=1e-4)
        assert len(found[end].top) == 2
        if end >= len(asked.prompt):  # greedy: the best is the one that was taken
            assert found[end].top[0] == (tokens[end], found[end].logprob)
    # Text and log-probs of a slice come together.
    assert [len(piece.logprobs) for piece in pieces[1:-1]] == [3, 3, 1]


def test_prompts_are_scored_in_turn_with_other_work_and_for_nobody_who_has_gone(engine, monkeypatch):
    """One request with many prompts held up all completions, even after its client had gone."""
    scored: Queue[int] = Queue()

    def slowly(model, prompt, top) -> tuple[()]:
        time.sleep(0.02)
        scored.put(1)
        return ()

    monkeypatch.setattr("proximo.serving.engine.prompt_logprobs", slowly)
    pieces: Queue[CompletionPiece] = Queue()
    with engine._changed:  # the engine waits until all are there
        many = [ask(engine, "1+2=", top=1, prompt_logprobs=True, max_tokens=0, key=10 + each) for each in range(40)]
        jobs = [CompletionJob(each, lambda piece: None) for each in many]
        engine.submit(*jobs, CompletionJob(ask(engine, "1+2=", max_tokens=2), pieces.put))
        for job in jobs[20:]:
            job.cancelled = True
    while pieces.get(timeout=60).finish is None:
        pass
    assert scored.qsize() < 15
    while engine.waiting or engine._streams:
        time.sleep(0.01)
    assert scored.qsize() == 20


def test_rows_are_scored_alike_together_and_alone(served):
    model, _ = served
    rows = [([1, 2], [3, 4, 5]), ([6], []), ([7, 8, 9], [10])]
    together = token_logprobs(model, rows, top=1)
    assert [len(each) for each in together] == [3, 0, 1]
    for row, found in zip(rows, together, strict=True):
        [alone] = token_logprobs(model, [row], top=1)
        assert [each.logprob for each in found] == pytest.approx([each.logprob for each in alone], abs=1e-5)
    assert [each.logprob for each in prompt_logprobs(model, [1, 2, 3], 0)][1:] == pytest.approx(
        [token_logprobs(model, [([1], [2])], 0)[0][0].logprob, together[0][0].logprob], abs=1e-5
    )


def test_a_job_that_fails_takes_no_other_with_it(engine, monkeypatch):
    def broken(*arguments, **options):
        raise ValueError("no memory")

    monkeypatch.setattr(engine._sampler, "stream", broken)
    [(_, [piece])] = completed(engine, ask(engine, "1"))
    assert piece.error == "no memory"
    monkeypatch.undo()
    [(_, pieces)] = completed(engine, ask(engine, "1"))
    assert pieces[-1].finish == "length"


def test_a_job_that_is_given_up_ends(engine):
    queue: Queue[CompletionPiece] = Queue()
    job = CompletionJob(ask(engine, "1", options=WARM, max_tokens=4000), queue.put)
    engine.submit(job)
    queue.get(timeout=60)
    job.cancelled = True
    while queue.get(timeout=60).finish is None:
        pass
    assert len(job.tokens) < 4000


def test_closing_ends_what_runs_and_what_waits(served):
    engine, queue = ServingEngine(*served, slots=1, slice_tokens=64), Queue()
    engine.submit(*(CompletionJob(ask(engine, "1", max_tokens=4000, key=key), queue.put) for key in range(2)))
    queue.get(timeout=60)
    engine.close()
    pieces = [queue.get_nowait() for _ in range(queue.qsize())]
    assert [piece.error for piece in pieces if piece.error] == ["the server is stopping"] * 2


@pytest.mark.parametrize(
    ("changes", "slots", "expected"),
    [
        ([{}, {"key": 2}, {"key": 3}], 2, [0, 1]),
        ([{}, {"key": 2, "options": WARM}, {"key": 3}], 4, [0, 2]),  # drawn otherwise
        ([{}, {}, {"sample": 1}], 4, [0, 2]),  # the same random numbers
        ([{"max_tokens": 2, "prompt": (1,) * 98}, {"key": 2}, {"key": 3, "max_tokens": 1}], 4, [0, 2]),  # no room
    ],
)
def test_batches_hold_what_can_be_decoded_together(changes, slots, expected):
    jobs = [
        CompletionJob(replace(CompletionRequest((1,), GREEDY, 8, key=1), **each), lambda piece: None)
        for each in changes
    ]

    def room(job: CompletionJob) -> tuple[int, int]:
        """Slices of 4 tokens, in a context of 100."""
        return min(4, job.left), min(4, 100 - len(job.request.prompt))

    batch = next_batch(jobs, slots, room)
    assert [jobs.index(job) for job in batch] == expected
