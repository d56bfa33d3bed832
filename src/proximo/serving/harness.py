"""A model for lm-evaluation-harness (`lm_eval`): it generates with the embedded sampler and scores with packed passes.

From Python: lm_eval.simple_evaluate(model=ProximoLM("runs/a"), tasks=["arc_easy"]). In a shell, with the harness's own
flags: python -m proximo.serving.harness run --model proximo --model_args model=runs/a --tasks arc_easy
"""
# pyright: reportMissingImports=false

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from proximo.api.threads import open_model
from proximo.models import Precision, prompt_tokens
from proximo.models.context_length import reach_of
from proximo.models.tokens.templates import rendered
from proximo.models.tokens.tokenizing import ReplyReader
from proximo.samplers.embedded import local_sampler
from proximo.samplers.sampler import SamplingOptions
from proximo.serving.logprobs import Row, token_logprobs
from proximo.types import Request

MAX_TOKENS = 256
"""Length limit of a completion whose task names none, as in the harness's own models."""
PASS_TOKENS = 8192
"""Tokens that run through the model at once when texts are scored."""
UNLIMITED = 1 << 20
"""Context of a model that has no limit."""
KNOWN = ("until", "max_gen_toks", "max_new_tokens", "max_tokens", "temperature", "top_p", "top_k", "min_p", "do_sample")
"""Arguments of generation that tasks may give."""


@register_model("proximo")
class ProximoLM(TemplateLM):
    """A model folder, run folder, checkpoint or hub id, for lm-evaluation-harness.

    Example: lm_eval.simple_evaluate(model=ProximoLM("runs/a"), tasks=["gsm8k"], apply_chat_template=True)
    """

    def __init__(
        self,
        model: str,
        device: str | None = None,
        dtype: Precision = "auto",
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        seed: int = 0,
    ) -> None:
        """`batch_size` is the number of completions decoded at once, 128 if it is not a number."""
        super().__init__()
        self._name, self._seed = model, seed
        self._model, self.tokenizer = open_model(model, device or "auto", dtype)
        self._model.requires_grad_(False)
        slots = int(batch_size) if batch_size is not None and str(batch_size).isdigit() else max_batch_size or 128
        self._sampler = local_sampler(self._model, self.tokenizer, slots=slots)
        reach = reach_of(self._model.config)
        self.max_length = UNLIMITED if reach is None else reach.tokens
        self._read = ReplyReader(self.tokenizer)

    @property
    def eot_token_id(self) -> int:
        return special_id(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that nothing precedes."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else special_id(bos)

    @property
    def tokenizer_name(self) -> str:
        return self._name.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if add_generation_prompt:
            return rendered(self.tokenizer, chat_history, for_answer=True)
        return rendered(self.tokenizer, chat_history, for_answer=False, arguments={"continue_final_message": True})

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        if add_special_tokens is False or not string:
            return self.tokenizer.encode(string, add_special_tokens=False)
        return list(prompt_tokens(self.tokenizer, string))

    # Scores

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """The log-prob of each continuation, and whether it is the greedy one. The start of a text that is too long is
        left out, as in the harness's own models."""
        rows: list[Row] = []
        for _, context, continuation in requests:
            kept = continuation[-self.max_length + 1 :]
            rows.append((context[max(0, len(context) + len(kept) - self.max_length) :], kept))
        results: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
        for batch in _batches(rows):
            scores = token_logprobs(self._model, [rows[number] for number in batch], top=1)
            for number, tokens in zip(batch, scores, strict=True):
                logprobs = [each.logprob for each in tokens if each.logprob is not None]
                results[number] = sum(logprobs), all(each.top[0][0] == each.token for each in tokens)
                if requests[number][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[number][0], results[number])
        return results

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-prob of whole texts, a window of the context after the other."""
        totals = []
        for request in requests:
            (text,) = request.args
            windows = get_rolling_token_windows(
                self.tok_encode(text, add_special_tokens=False), self.prefix_token_id, self.max_length - 1, 1
            )
            pairs: Any = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(logprob for logprob, _ in self._loglikelihood_tokens(pairs)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
        return totals

    # Completions

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """A completion of each context; those with equal arguments are sampled together."""
        alike: dict[SamplingOptions, list[int]] = {}
        for number, request in enumerate(requests):
            alike.setdefault(self._options(request.args[1]), []).append(number)
        texts = [""] * len(requests)
        for options, numbers in alike.items():
            special = [each for each in options.stop if each in self.tokenizer.all_special_tokens]
            stop = tuple(each for each in options.stop if each not in special)
            ends = {special_id(self.tokenizer.convert_tokens_to_ids(each)) for each in special}
            chosen = SamplingOptions(**{**vars(options), "stop": stop})
            room = max(1, self.max_length - options.max_tokens)
            prompts = [
                Request(number, tuple(self.tok_encode(requests[number].args[0])[-room:]), num_samples=1)
                for number in numbers
            ]
            for index, (completion,) in self._sampler.stream(prompts, chosen, seed=self._seed, step=-1):
                number, text = numbers[index], completion.text
                if cut := [spot for spot, token in enumerate(completion.tokens) if token in ends]:
                    # Special tokens are no part of a text, so that a stop string would never be found.
                    text = self._read(prompts[index].prompt_tokens, completion.tokens[: cut[0]])
                texts[number] = text
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return texts

    def _options(self, given: Mapping[str, Any]) -> SamplingOptions:
        if unknown := [name for name in given if name not in KNOWN]:
            raise ValueError(f"generation_kwargs has {unknown[0]}: give some of {', '.join(KNOWN)}")
        until = given.get("until") or ()
        lengths = [given[name] for name in ("max_gen_toks", "max_new_tokens", "max_tokens") if name in given]
        temperature = float(given.get("temperature", 1.0 if given.get("do_sample") else 0.0))
        return SamplingOptions(
            temperature=temperature if given.get("do_sample", True) else 0.0,
            top_p=float(given.get("top_p", 1.0)),
            top_k=given.get("top_k") or None,
            min_p=float(given.get("min_p", 0.0)),
            max_tokens=min(int(lengths[0]) if lengths else MAX_TOKENS, self.max_length - 1),
            stop=tuple(each for each in ([until] if isinstance(until, str) else until) if each),
        )


def special_id(token: object) -> int:
    """A tokenizer's id of a special token, which the harness cannot do without."""
    if not isinstance(token, int):
        raise ValueError("the tokenizer has no end-of-sequence token: set tokenizer.eos_token")
    return token


def _batches(rows: Sequence[Row]) -> Iterator[list[int]]:
    """Numbers of the rows that have tokens to score, about `PASS_TOKENS` tokens at a time. Rows with the same prompt
    are neighbours in most tasks and stay together."""
    batch: list[int] = []
    size = 0
    for number, (before, tokens) in enumerate(rows):
        if not tokens:
            continue
        if batch and size + len(before) + len(tokens) > PASS_TOKENS:
            yield batch
            batch, size = [], 0
        batch.append(number)
        size += len(before) + len(tokens)
    if batch:
        yield batch


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
