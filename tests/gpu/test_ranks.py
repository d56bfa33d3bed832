"""One rank on a GPU: what is loaded and held where."""

from pathlib import Path

import pytest
import torch

from proximo.distributed.mesh import Mesh
from proximo.distributed.policy import ShardedPolicy
from proximo.distributed.rank0 import OnRanks
from proximo.distributed.rank_group import Crew
from proximo.learner.ranks import Ranks
from proximo.models import load_model, tiny_model, tiny_tokenizer, with_precision
from proximo.models.adapters.lora import Lora
from proximo.rl.build import build_learner
from proximo.rl.config import RunConfig
from proximo.samplers.embedded import Embedded
from proximo.samplers.engines.options import Fleet

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize(
    ("sampler", "adapter"),
    [(Fleet(urls=("http://127.0.0.1:9",)), None), (Embedded(), None), (Fleet(urls=("http://127.0.0.1:9",)), Lora())],
)
def test_no_more_than_shards_a_layer_and_a_copy_is_ever_on_the_gpu(sampler, adapter, tmp_path: Path):
    model = tiny_model(hidden=512, layers=12, heads=8, kv_heads=4, intermediate=2048)
    with_precision(model, torch.bfloat16).save_pretrained(tmp_path)
    tokenizer, mesh = tiny_tokenizer(), Mesh.alone(device="cuda")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    try:
        config = RunConfig(model=str(tmp_path), ranks=Ranks(1), sampler=sampler, adapter=adapter, device="cuda")
        policy = build_learner(config, str(tmp_path), "cuda", tokenizer, OnRanks(Crew(mesh))).learner.policy
        peak = torch.cuda.max_memory_allocated() - before
        assert isinstance(policy, ShardedPolicy)
        sizes = [each.nbytes for each in policy.model.parameters()]
        reference = 0 if adapter is not None else sum(sizes) // 2
        copied = sum(sizes) // 2 if isinstance(sampler, Embedded) else 0
        layer = max(sum(each.nbytes for each in block.parameters()) for block in policy.model.model.layers)
        assert peak < sum(sizes) + reference + copied + 2 * max(layer, *sizes) + (4 << 20)
        copy = policy.copy.model
        assert copy.device.type == ("cuda" if copied else "cpu")
        assert all(each.is_pinned() for each in copy.parameters()) or copied
        held = {(each.requires_grad, each.dtype) for each in policy.model.parameters()}
        assert (False, torch.float32) not in held
        assert (True, torch.bfloat16) not in held
        with torch.no_grad():
            for each in copy.parameters():
                each.zero_()
        policy.copy.is_old = True
        policy.copy.refresh()
        stored = dict(load_model(str(tmp_path), dtype=None).named_parameters())
        if adapter is None:
            for name, each in copy.named_parameters():
                assert torch.equal(each.cpu(), stored[name])
        rows = [(5, 6, 7)], torch.tensor([[8, 9]]), torch.tensor([2])
        assert policy.logprobs(*rows).isfinite().all()
    finally:
        mesh.close()
