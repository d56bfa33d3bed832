"""Tokens that end a completion, by a model and by its files."""

import json

import pytest

from proximo.models import load_model, load_tokenizer, tiny_model, tiny_tokenizer
from proximo.models.reward_models import load_reward_model
from proximo.models.stop_tokens import declared_ends, end_tokens


@pytest.mark.parametrize("ends", [1, [1, 4]])
def test_a_folder_names_the_ends_of_its_model_and_so_does_a_reward_model_made_of_it(ends, tmp_path):
    model = tiny_model(hidden=16, layers=1, heads=2, kv_heads=1, intermediate=16)
    for folder in (model, tiny_tokenizer()):
        folder.save_pretrained(tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": ends}))
    wanted = {ends} if isinstance(ends, int) else set(ends)
    assert declared_ends(str(tmp_path)) == wanted
    tokenizer = load_tokenizer(str(tmp_path))
    assert end_tokens(load_model(str(tmp_path)), tokenizer) >= wanted
    load_reward_model(str(tmp_path)).save_pretrained(tmp_path / "judge")
    assert not (tmp_path / "judge" / "generation_config.json").exists()
    assert declared_ends(str(tmp_path / "judge")) == wanted
