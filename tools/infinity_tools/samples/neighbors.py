"""Whether samples that lie side by side in one row see each other, tried on a small copy of the model."""

from __future__ import annotations

from typing import Any

import torch

from infinity.errors import InfinityError
from infinity.models.building import one_line
from infinity.models.small import VOCABULARY, small_copy

_FIRST, _SECOND = 7, 9  # tokens of the two samples of the row
_ROUNDING = 1e-3
"""Of what a sample's own tokens change: experts that compute tokens of all samples together round in another way."""


def why_apart(config: Any) -> str:
    """Return why samples of this model cannot lie side by side in one row, or an empty text where they can.

    A row of two samples, told apart by positions that begin again, is computed beside rows in which one of them has
    other tokens: what the other one predicts must not change. What cannot be tried is not taken to be so.

    Args:
        config: of a causal language model of transformers.
    """
    try:
        model = small_copy(config, "AutoModelForCausalLM")
        kept = _keeps_apart(model, _tokens(model.config))
    except InfinityError as error:  # no such copy
        return f"cannot check whether packed samples see each other: {error}"
    except Exception as error:  # whatever a model makes of positions that begin again
        return f"cannot check whether packed samples see each other: {one_line(error)}"
    if kept is None:
        return "cannot check whether packed samples see each other: a small copy predicts the same for any tokens"
    return (
        ""
        if kept
        else f"{config.model_type} does not separate packed samples: predictions depend on the neighboring sample"
    )


def _tokens(config: Any) -> torch.Tensor:
    """Return tokens of the two samples, once and once more: others, none of them one with a meaning of its own."""
    special: set[Any] = set()
    for part in (config, config.get_text_config()):
        for name, value in part.to_dict().items():
            if "token_id" in name or "token_index" in name:
                special.update(value if isinstance(value, list) else [value])
    known = min(VOCABULARY, config.get_text_config().vocab_size)
    plain = [token for token in range(known) if token not in special]
    generator = torch.Generator().manual_seed(1)
    row = torch.tensor(plain)[torch.randint(len(plain), (_FIRST + _SECOND,), generator=generator)]
    other = torch.tensor(plain)[(torch.tensor([plain.index(token) for token in row.tolist()]) + 1) % len(plain)]
    return torch.stack([row, other])


def _keeps_apart(model: Any, tokens: torch.Tensor) -> bool | None:
    """Whether what a sample predicts depends on none but its own tokens; None: not even on those."""
    first, second = slice(0, _FIRST), slice(_FIRST, None)
    positions = torch.cat([torch.arange(_FIRST), torch.arange(_SECOND)])[None]

    def predicted(changed: slice) -> torch.Tensor:
        row = tokens[:1].clone()
        row[:, changed] = tokens[1:, changed]
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            found: torch.Tensor = model(input_ids=row, position_ids=positions, use_cache=False).logits
        return found[0].double()

    before = predicted(slice(0, 0))
    own = float((predicted(slice(_FIRST, _FIRST + 1)) - before)[_FIRST + 1 :].abs().max())
    moved = [(predicted(neighbor) - before)[sample] for neighbor, sample in ((first, second), (second, first))]
    others = max(float(change.abs().max()) for change in moved)
    if not own > 0 or not others >= 0:  # also where they are no numbers
        return None
    return others <= _ROUNDING * own
