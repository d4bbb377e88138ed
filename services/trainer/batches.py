"""Groups of completions, laid out so that a forward pass computes each distinct token once.

The samples of a group share their prompt, so a group becomes one run of tokens: the prompt, then every completion, each
with position ids that continue the prompt's. Runs are laid end to end in one flat axis N without padding, which is what
embeddings, projections and norms see. Attention alone needs whole sequences: it reads them through index rows (prompt and
one completion each, see :mod:`services.trainer.attention`), so a completion attends to its prompt and itself only, and the
result equals training every sequence alone.

What follows a completion's last trained token, and that token itself as an input, predicts nothing and is left out.

Axes: N flat tokens of a micro-batch, M trained tokens of it, S sequences of a block, L positions of a block's rows.
"""

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from libs.common.errors import JigsawError
from libs.common.tokens import TRAINED, TokenArray
from services.trainer.grpo import Normaliser

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


class Completion(msgspec.Struct, frozen=True):
    """What followed a prompt: tokens with behaviour log-probs, versions and flags (``libs.common.tokens.TOKEN``)."""

    tokens: TokenArray


class Group(msgspec.Struct, frozen=True):
    """The valid samples of one prompt.

    Attributes:
        advantages_G: one per completion.
    """

    prompt_ids: Sequence[int]
    completions: Sequence[Completion]
    advantages_G: Sequence[float]


class MicroBatch(msgspec.Struct, frozen=True):
    """What one forward pass takes.

    Attributes:
        ids_N, positions_N: flat tokens and their positions within their sequences.
        rows: per block, indices into N, shape [S, L]: rows of similar length, right-padded with a token of the row.
        source_N: where token n's attention output lies in the blocks' outputs laid end to end.
        predictor_M: index into N of the token whose hidden state predicts trained token m.
        target_M: its id. behaviour_M: its log-prob (nats) when it was sampled. advantage_M: of its completion.
        weight_M: its share of the loss's average over the whole update.
        padding: positions in rows beyond their sequences' ends.
    """

    ids_N: torch.Tensor
    positions_N: torch.Tensor
    rows: tuple[torch.Tensor, ...]
    source_N: torch.Tensor
    predictor_M: torch.Tensor
    target_M: torch.Tensor
    behaviour_M: torch.Tensor
    advantage_M: torch.Tensor
    weight_M: torch.Tensor
    padding: int

    @property
    def tokens(self) -> int:
        """Tokens that the forward pass computes."""
        return len(self.ids_N)

    @property
    def trained(self) -> int:
        """Tokens that enter the loss."""
        return len(self.target_M)

    @property
    def attended(self) -> int:
        """Positions of all rows, padding included."""
        return sum(block.numel() for block in self.rows)

    def to(self, device: torch.device) -> "MicroBatch":
        """The same micro-batch with its tensors on ``device``."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        moved = {name: value.to(device) for name, value in fields.items() if isinstance(value, torch.Tensor)}
        return MicroBatch(**{**fields, **moved, "rows": tuple(block.to(device) for block in self.rows)})


class _Tail(msgspec.Struct, frozen=True):
    """A completion as the forward pass sees it: inputs, and which of its tokens are trained."""

    ids: Ints
    trained: Ints
    target: Ints
    behaviour: Floats
    advantage: float


class _Run(msgspec.Struct, frozen=True):
    """A prompt followed by some of its group's completions."""

    prompt: Ints
    tails: Sequence[_Tail]

    @property
    def tokens(self) -> int:
        return len(self.prompt) + sum(len(tail.ids) for tail in self.tails)


def trained_lengths(groups: Iterable[Group]) -> list[int]:
    """Trained tokens of every completion, in order."""
    return [int((completion.tokens["flags"] & TRAINED != 0).sum()) for group in groups for completion in group.completions]


def pack(groups: Sequence[Group], *, budget: int, normaliser: Normaliser) -> list[MicroBatch]:
    """Lay groups out in micro-batches of at most ``budget`` tokens; the same groups always give the same layout.

    A group that exceeds the budget is divided into parts that repeat its prompt. A single sequence that exceeds it gets a
    micro-batch alone. Completions without a trained token are left out.

    Args:
        normaliser: of the whole update that these groups belong to.

    Raises:
        JigsawError: a group without prompt tokens: nothing would predict its completions' first tokens.
    """
    runs = sorted((run for group in groups for run in _runs(group, budget)), key=lambda run: -run.tokens)
    bins: list[list[_Run]] = []
    room: list[int] = []
    for run in runs:
        slot = next((index for index, free in enumerate(room) if free >= run.tokens), len(bins))
        if slot == len(bins):
            bins.append([])
            room.append(budget)
        bins[slot].append(run)
        room[slot] -= run.tokens
    return [_lay_out(chosen, normaliser) for chosen in bins]


def _runs(group: Group, budget: int) -> list[_Run]:
    """The group as runs that fit the budget where a single sequence does."""
    prompt = np.asarray(group.prompt_ids, np.int64)
    if not len(prompt):
        raise JigsawError("a group needs a prompt of at least one token")
    pairs = zip(group.completions, group.advantages_G, strict=True)
    tails = [tail for completion, advantage in pairs if (tail := _tail(completion, advantage)) is not None]
    runs: list[_Run] = []
    part: list[_Tail] = []
    size = len(prompt)
    for tail in sorted(tails, key=lambda tail: -len(tail.ids)):
        if part and size + len(tail.ids) > budget:
            runs.append(_Run(prompt, part))
            part, size = [], len(prompt)
        part.append(tail)
        size += len(tail.ids)
    return [*runs, _Run(prompt, part)] if part else runs


def _tail(completion: Completion, advantage: float) -> _Tail | None:
    """The completion up to its last predicting token, or None if nothing of it is trained."""
    tokens = completion.tokens
    trained = np.flatnonzero(tokens["flags"] & TRAINED)
    if not len(trained):
        return None
    ids = tokens["id"].astype(np.int64)
    return _Tail(
        ids=ids[: trained[-1]],
        trained=trained,
        target=ids[trained],
        behaviour=tokens["logprob"][trained],
        advantage=float(advantage),
    )


def _lay_out(runs: Sequence[_Run], normaliser: Normaliser) -> MicroBatch:
    """One micro-batch of these runs."""
    ids, positions, sequences, predictors = [], [], [], []
    start = 0
    for run in runs:
        prompt_N = np.arange(start, start + len(run.prompt))
        ids.append(run.prompt)
        positions.append(np.arange(len(run.prompt)))
        start += len(run.prompt)
        for tail in run.tails:
            sequence = np.concatenate([prompt_N, np.arange(start, start + len(tail.ids))])
            ids.append(tail.ids)
            positions.append(np.arange(len(run.prompt), len(sequence)))
            sequences.append(sequence)
            predictors.append(sequence[len(run.prompt) + tail.trained - 1])
            start += len(tail.ids)
    tails = [tail for run in runs for tail in run.tails]
    lengths = [len(tail.target) for tail in tails]
    rows, source_N = _rows(sequences, start)
    return MicroBatch(
        ids_N=torch.from_numpy(np.concatenate(ids)),
        positions_N=torch.from_numpy(np.concatenate(positions)),
        rows=tuple(torch.from_numpy(block) for block in rows),
        source_N=torch.from_numpy(source_N),
        predictor_M=torch.from_numpy(np.concatenate(predictors)),
        target_M=torch.from_numpy(np.concatenate([tail.target for tail in tails])),
        behaviour_M=torch.from_numpy(np.concatenate([tail.behaviour for tail in tails])),
        advantage_M=torch.tensor(np.repeat([tail.advantage for tail in tails], lengths), dtype=torch.float32),
        weight_M=torch.tensor(np.repeat([normaliser.weight(length) for length in lengths], lengths), dtype=torch.float32),
        padding=sum(block.size for block in rows) - sum(len(sequence) for sequence in sequences),
    )


def _rows(sequences: Sequence[Ints], tokens: int) -> tuple[list[Ints], Ints]:
    """Blocks of rows of similar length (padding under a tenth where sequences are long), and each token's output place.

    A prompt lies in several rows with equal outputs; any one of them is its source.
    """
    blocks: list[list[Ints]] = []
    for sequence in sorted(sequences, key=lambda sequence: -len(sequence)):
        longest = len(blocks[-1][0]) if blocks else 0
        if not blocks or len(sequence) < longest - max(8, longest // 10):
            blocks.append([])
        blocks[-1].append(sequence)
    source_N = np.zeros(tokens, np.int64)
    rows, offset = [], 0
    for block in blocks:
        width = len(block[0])
        for sequence in block:
            source_N[sequence] = np.arange(offset, offset + len(sequence))
            offset += width
        rows.append(np.stack([np.pad(sequence, (0, width - len(sequence)), mode="edge") for sequence in block]))
    return rows, source_N
