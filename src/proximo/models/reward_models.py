"""Reward models: one number for a prompt and its completion, read where transformers reads it."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad as widened

from proximo.models.adapters.targets import SCORE
from proximo.models.context_length import check_rows
from proximo.models.devices import placed
from proximo.models.loading import base_of, has_score, load_tokenizer, load_weights, read_config
from proximo.models.model_types import PreTrainedConfig, PreTrainedModel
from proximo.models.packing.layout import pad
from proximo.models.packing.support import supports_packing, warn_of_fallback
from proximo.models.scoring import completion_states
from proximo.models.stop_tokens import declared_ends
from proximo.models.torch_globals import guarded
from proximo.types.batches import to_device
from proximo.types.tensor_types import Float, Int

HEAD = SCORE


def load_reward_model(
    path: str,
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = torch.float32,
    seed: int = 0,
    fresh_head: bool = True,
    keep_adapter: bool = False,
) -> PreTrainedModel:
    """A model with one score, in eval mode: a reward model with its own head, a causal model with a fresh one; an
    adapter's gives its base model with the adapter merged into the weights, unless `keep_adapter`.

    A fresh head is drawn from the seed. `fresh_head=False` refuses a model that has none of its own.

    Example: judge = load_reward_model("runs/judge/checkpoints/step-000040")
    """
    import transformers

    kind = transformers.AutoModelForSequenceClassification
    model, missing = load_weights(
        path,
        kind,
        dtype=dtype,
        config=_config(path),
        unused=("lm_head.weight",),
        device=device,
        keep_adapter=keep_adapter,
    )
    head = dict(model.named_children()).get(HEAD)
    if type(head) is not nn.Linear:
        raise ValueError(f"path {path!r}: {type(model).__name__} has no linear {HEAD!r} head; use a decoder's folder")
    if missing - {f"{HEAD}.weight"}:
        raise ValueError(f"path {path!r}: the weights lack {', '.join(sorted(missing))}; save the model again, whole")
    if missing and not fresh_head:
        raise ValueError(_headless(path))
    if missing:
        generator = torch.Generator().manual_seed(seed)
        weight = torch.empty(head.weight.shape, dtype=torch.float32)
        nn.init.normal_(weight, std=(head.in_features + 1) ** -0.5, generator=generator)
        with torch.no_grad():
            head.weight.copy_(weight)
    _set_pad(model, path, is_fresh=bool(missing) or not has_score(read_config(base_of(path))))
    return placed(model, device).eval()


def reward_skeleton(path: str) -> PreTrainedModel:
    """The reward model that `load_reward_model` gives, without its weights."""
    import transformers

    config = _config(path)
    try:
        with guarded(), torch.device("meta"):
            return transformers.AutoModelForSequenceClassification.from_config(config)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"path {path!r}: transformers cannot build a reward model of it; {reason}") from error


def check_scores(path: str) -> None:
    """Refuse a model that speaks where one that scores is needed, by its config alone."""
    config = _config(path)
    if config.architectures and not has_score(config):  # of one that does not say what it is, the weights will tell
        raise ValueError(_headless(path))


def _headless(path: str) -> str:
    return (
        f"path {path!r}: no score head, so its scores would be random; train one first: "
        f"proximo reward-model DATA --model {path}"
    )


def completion_scores(
    model: PreTrainedModel,
    *,
    prompts: Sequence[Sequence[int]],
    tokens: Int[Tensor, "B T"],
    lengths: Int[Tensor, " B"],
    group: Int[Tensor, " B"],
    layout: Literal["packed", "padded"] = "packed",
) -> Float[Tensor, " B"]:
    """The score of each row, `tokens[b, :lengths[b]]` after `prompts[group[b]]`; an empty one scores its prompt.

    Equal to `model(input_ids, attention_mask).logits` of each whole sequence. Packed runs each prompt once.
    """
    # One more token, which nothing reads: the state that predicts it is that of the last real token.
    tokens = widened(tokens.cpu(), (0, 1))
    prompts, lengths, group = _until_scored(prompts, tokens, lengths.cpu(), group.cpu(), pad_token(model.config))
    check_rows(model, prompts, lengths, group)
    if supports_packing(model):
        states = completion_states(
            model, prompts=prompts, tokens=tokens, lengths=lengths + 1, group=group, layout=layout
        )
        last = to_device((lengths + 1).cumsum(0) - 1, model.device)
        return model.get_submodule(HEAD)(states.flat.index_select(0, last)).squeeze(1)
    if layout == "packed":
        warn_of_fallback(type(model).__name__)
    padded = pad(prompts, tokens, lengths, group).to(model.device)
    filled = padded.tokens.masked_fill(~padded.mask, pad_token(model.config))
    return model(input_ids=filled, attention_mask=padded.mask, use_cache=False).logits.squeeze(1)


def pad_token(config: PreTrainedConfig) -> int:
    """The token that transformers does not score at."""
    token = config.get_text_config().pad_token_id
    assert isinstance(token, int), "load_reward_model sets it"
    return token


def _until_scored(
    prompts: Sequence[Sequence[int]],
    tokens: Int[Tensor, "B T"],
    lengths: Int[Tensor, " B"],
    group: Int[Tensor, " B"],
    padding: int,
) -> tuple[list[Sequence[int]], Int[Tensor, " B"], Int[Tensor, " B"]]:
    """Rows that end where transformers reads their score: at the last token that is not padding.

    Where padding is the end of sequence, as in SmolLM2, that is the token before it.
    """
    after = torch.arange(1, tokens.shape[1] + 1)
    counted = (after <= lengths[:, None]) & (tokens != padding)
    lengths = (after * counted).amax(dim=1)
    prompts, group = list(prompts), group.clone()
    # Only a row of which nothing is left looks at how its prompt ends.
    for row in (lengths == 0).nonzero()[:, 0].tolist():
        prompt = prompts[int(group[row])]
        end = max((length for length, token in enumerate(prompt, start=1) if token != padding), default=1)
        if end < len(prompt):
            group[row] = len(prompts)
            prompts.append(prompt[:end])
    return prompts, lengths, group


def _config(path: str) -> PreTrainedConfig:
    """Config with one label; a head of several is no reward model. All end tokens are in it: such a model has no other
    file that names them, and what it reads later must end as what it is trained on."""
    config = read_config(path)
    ends = sorted(declared_ends(path))
    config.eos_token_id = ends if len(ends) > 1 else config.eos_token_id
    if has_score(config) and config.num_labels != 1:
        raise ValueError(f"path {path!r}: a classifier of {config.num_labels} labels; a reward model has 1")
    config.num_labels = 1
    return config


def _set_pad(model: PreTrainedModel, path: str, *, is_fresh: bool) -> None:
    """A reward model's own; a fresh head takes its tokenizer's, so that both agree on what to leave out."""
    config = model.config.get_text_config()
    if is_fresh or config.pad_token_id is None:
        tokenizer = load_tokenizer(path)
        config.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    if config.pad_token_id is None:
        raise ValueError(f"path {path!r}: neither a pad nor an eos token; set tokenizer.pad_token and save it again")
