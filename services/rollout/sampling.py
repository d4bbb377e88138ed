"""The sampling step of every engine: temperature, probabilities, and an arg-max with noise keyed by (seed, position).

Invariants: the noise of a token depends on its trajectory's seed and its index after the prompt alone, never on the batch,
the engine or what ran before, so a resumed trajectory draws what the uninterrupted one would have drawn. The log-prob is
that of the distribution really sampled from. All arithmetic is float32.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from libs.common.errors import ModelError

_WORD = (1 << 64) - 1
_LARGEST_UNIFORM = 1.0 - 2.0**-24

Float32Array = npt.NDArray[np.float32]


class Draw(msgspec.Struct, frozen=True):
    """What one row of logits is sampled with.

    Attributes:
        seed: of the trajectory.
        position: index of the token after the prompt, from 0.
        temperature: 0 takes the most likely token.
    """

    seed: int
    position: int
    temperature: float


def exponential_noise(out_V: Float32Array, *, seed: int, position: int) -> None:
    """Fill a row with independent Exp(1) variates that (seed, position) alone determine.

    Philox4x64 (Salmon et al., 2011) counts from ``position`` under the key ``seed``; 31 bits of it make u in (0, 1), and
    -log(1 - u) is exponential. Taking the logarithm of 1 - u keeps small variates, which decide the race for unlikely
    tokens, at full relative precision and above 0: numpy's float32 ``standard_exponential`` returns exactly 0 once in some
    ten million draws, which in a large vocabulary hands a few of a thousand tokens to an arbitrary id.
    """
    vocab = out_V.shape[0]
    words = np.random.Philox(key=seed & _WORD, counter=position << 192).random_raw((vocab + 1) // 2).view(np.uint32)
    np.copyto(out_V, np.right_shift(words[:vocab], 1, out=words[:vocab]), casting="unsafe")
    out_V += 0.5
    out_V *= 2.0**-31
    np.minimum(out_V, _LARGEST_UNIFORM, out=out_V)
    np.negative(np.log1p(np.negative(out_V, out=out_V), out=out_V), out=out_V)


def sample(logits_BV: torch.Tensor, draws: Sequence[Draw]) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row.

    With E exponential, arg-max p / E is a draw from p: the exponential race, which is the Gumbel-max trick without its
    logarithms (Maddison et al., 2014).

    Args:
        logits_BV: of any floating type, on any device; not changed.
        draws: one per row.

    Returns:
        Token ids (B,) int64 and log-probs (B,) float32 in nats, on the device of the logits. The log-prob is under the
        tempered distribution; of a greedy row, under temperature 1.

    Raises:
        ModelError: a row isn't a distribution (NaN or infinite logits).
    """
    probs_BV = torch.softmax(_tempered(logits_BV, draws), dim=-1)
    winners = _race_on_cpu(probs_BV.numpy(), draws) if probs_BV.device.type == "cpu" else _race(probs_BV, draws)
    ids_B = torch.as_tensor(winners, dtype=torch.int64, device=probs_BV.device)
    logprobs_B = probs_BV.gather(1, ids_B.unsqueeze(1)).squeeze(1).log_()
    if not bool(torch.isfinite(logprobs_B).all()):
        raise ModelError("the policy's logits are not finite: its weights are broken")
    return ids_B, logprobs_B


def _race_on_cpu(probs_BV: Float32Array, draws: Sequence[Draw]) -> list[int]:
    """Winner of each row; row by row to stay in the core's cache, in numpy for an arg-max ten times as fast as torch's."""
    noise_V = np.empty(probs_BV.shape[1], np.float32)
    winners = []
    for probs_V, draw in zip(probs_BV, draws, strict=True):
        if draw.temperature == 0:
            winners.append(int(probs_V.argmax()))
            continue
        exponential_noise(noise_V, seed=draw.seed, position=draw.position)
        winners.append(int(np.divide(probs_V, noise_V, out=noise_V).argmax()))
    return winners


def _race(probs_BV: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Winner of each row on an accelerator, with the same noise as on a CPU."""
    noise_BV = np.ones(tuple(probs_BV.shape), np.float32)
    for noise_V, draw in zip(noise_BV, draws, strict=True):
        if draw.temperature > 0:
            exponential_noise(noise_V, seed=draw.seed, position=draw.position)
    return (probs_BV / torch.from_numpy(noise_BV).to(probs_BV.device)).argmax(dim=-1)


def _tempered(logits_BV: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """The logits in float32, each row divided by its temperature (greedy: 1)."""
    logits_BV = logits_BV.float()
    temperatures = [draw.temperature or 1.0 for draw in draws]
    if all(temperature == 1.0 for temperature in temperatures):
        return logits_BV
    return logits_BV / torch.tensor(temperatures, device=logits_BV.device).unsqueeze(1)
