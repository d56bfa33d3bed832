"""The tiny model and tokenizer, and loading from folders."""

import pytest
import torch
from torch.testing import assert_close
from transformers import Gemma2Config, Gemma2ForCausalLM

from proximo.models import (
    PaddedFallback,
    load_model,
    load_tokenizer,
    prompt_tokens,
    score,
    tiny_model,
    tiny_tokenizer,
)
from proximo.models.packing.attention import uses_our_attention
from proximo.models.packing.support import warn_of_fallback

CONVERSATION = ({"role": "system", "content": "Add."}, {"role": "user", "content": "1+2"})


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def small():
    return tiny_model(hidden=32, layers=2, intermediate=48)


# Tokenizer


def test_one_token_per_character():
    tokenizer = tiny_tokenizer()
    text = "".join(map(chr, range(32, 127))) + "\n12 + 7 = 19,  don't \n\n"
    tokens = tokenizer.encode(text)
    assert len(tokens) == len(text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.unk_token_id not in tokens


def test_special_tokens_are_distinct_and_unknown_characters_are_unknown():
    tokenizer = tiny_tokenizer()
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert tokenizer.encode("é∑") == [2, 2]
    assert tokenizer.decode([*tokenizer.encode("19"), 1, 0], skip_special_tokens=True) == "19"


def test_prompt_text_is_encoded_as_it_is():
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(list(prompt_tokens(tokenizer, "1+2="))) == "1+2="


def test_prompt_conversation_goes_through_the_template():
    tokenizer = tiny_tokenizer()
    expected = "system: Add.\nuser: 1+2\nassistant: "
    assert tokenizer.decode(list(prompt_tokens(tokenizer, CONVERSATION))) == expected


def test_prompts_that_cannot_be_encoded_say_why():
    tokenizer = tiny_tokenizer()
    with pytest.raises(ValueError, match="has no tokens"):
        prompt_tokens(tokenizer, "")
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        prompt_tokens(tokenizer, CONVERSATION)


# Model


def test_the_tiny_model_fits_its_tokenizer():
    model, tokenizer = tiny_model(), tiny_tokenizer()
    assert model.config.vocab_size == len(tokenizer)
    for config in (model.config, model.generation_config):
        assert (config.pad_token_id, config.eos_token_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id)
    assert 500_000 < sum(parameter.numel() for parameter in model.parameters()) < 5_000_000
    assert model.dtype == torch.float32
    assert not model.training
    assert uses_our_attention(model)


def test_a_seed_is_a_model_and_disturbs_nobody():
    before = torch.get_rng_state()
    first, again, other = small(), small(), tiny_model(hidden=32, layers=2, intermediate=48, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(first.get_parameter(name), again.get_parameter(name))
    assert not torch.equal(first.get_parameter(name), other.get_parameter(name))


def test_a_shape_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="heads 3"):
        tiny_model(hidden=32, heads=3)


# Folders


def test_save_and_load_give_the_same_scores_and_tokens(tmp_path):
    model, tokenizer = small(), tiny_tokenizer()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded, loaded_tokenizer = load_model(str(tmp_path)), load_tokenizer(str(tmp_path))

    prompt = prompt_tokens(loaded_tokenizer, CONVERSATION)
    assert prompt == prompt_tokens(tokenizer, CONVERSATION)
    assert loaded_tokenizer.decode(list(prompt)) == tokenizer.decode(list(prompt))
    assert (loaded_tokenizer.pad_token_id, loaded_tokenizer.eos_token_id) == (0, 1)
    assert loaded.generation_config.eos_token_id == 1
    assert uses_our_attention(loaded)
    assert not loaded.training
    rows = {"prompts": [prompt], "tokens": torch.tensor([[20, 1]]), "lengths": torch.tensor([2])}
    rows["group"] = torch.tensor([0])
    assert torch.equal(score(loaded, **rows).logprobs, score(model, **rows).logprobs)
    assert_close(load_model(str(tmp_path), dtype=torch.float64).lm_head.weight, model.lm_head.weight.double())


def test_unsupported_models_keep_their_attention_and_warn(tmp_path):
    config = Gemma2Config(
        vocab_size=9,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
    )
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    warn_of_fallback.cache_clear()
    with pytest.warns(PaddedFallback, match="Gemma2ForCausalLM"):
        model = load_model(str(tmp_path))
    assert not uses_our_attention(model)


def test_pickle_is_never_read(tmp_path):
    model = small()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pytorch_model.bin: convert to safetensors"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("nobody/nothing", "neither a folder nor a model that the hub"),
        ("./missing", "there is no folder of this name"),
        ("runs/none", "there is no folder of this name"),
    ],
)
def test_missing_models_say_what_to_do(path, why):
    for load in (load_model, load_tokenizer):
        with pytest.raises(ValueError, match=why):
            load(path)


def test_half_a_folder_says_what_is_missing(tmp_path):
    with pytest.raises(ValueError, match="no weights"):
        load_model(str(tmp_path))
    with pytest.raises(ValueError, match="save model and tokenizer into it"):
        load_tokenizer(str(tmp_path))
