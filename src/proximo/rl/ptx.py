"""PPO-ptx: the gradient of examples from a file, added to that of an update."""

import torch

from proximo.data import DataFile, read_examples
from proximo.data.mixing import Ptx
from proximo.models.model_types import PreTrainedModel, PreTrainedTokenizerBase
from proximo.models.stop_tokens import end_tokens
from proximo.supervised.encoding import prepare
from proximo.supervised.sft import Supervised
from proximo.types import Stats


class MixedIn:
    """Adds a supervised gradient to what the parameters have. Which examples an update gets follows from the seed and
    the number of updates before it, so a resumed run draws the same."""

    def __init__(
        self,
        options: Ptx,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        token_budget: int,
        seed: int,
    ) -> None:
        """ValueError lists what is wrong with the file."""
        self._options, self._seed = options, seed
        file = DataFile(options.path, held_out=0.0, max_tokens=options.max_tokens)
        data = prepare(file, read_examples, tokenizer, end_tokens(model, tokenizer))
        data.check_room(model)
        self._stage = Supervised(model, data.train, [], token_budget=token_budget)

    def __call__(self, version: int) -> Stats:
        """Add the gradient for the update after `version` others; the loss is without its coefficient."""
        total = torch.zeros(())
        for loss, _ in self._stage.losses(self.items(version)):
            (self._options.coefficient * loss).backward()
            total = total + loss.detach().cpu()
        return Stats(totals={"ptx_loss": total})

    def items(self, version: int) -> list[int]:
        """Indices of the examples of an update: the next ones of a permutation, then of another."""
        first, size = version * self._options.examples, self._stage.size
        places = range(first, first + self._options.examples)
        orders = {epoch: self._order(epoch) for epoch in {place // size for place in places}}
        return [orders[place // size][place % size] for place in places]

    def _order(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(self._seed + 1_000_003 * epoch)
        return torch.randperm(self._stage.size, generator=generator).tolist()
