"""The process's random states (Python, numpy, torch) as plain data, so that a checkpoint can carry them."""

import random
from typing import Any

import numpy as np
import torch


def seed(value: int) -> None:
    """Seed all generators."""
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)


def capture() -> dict[str, Any]:
    """Their states now, in msgpack's types."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, np.asarray(keys, "<u4").tobytes(), position, has_gauss, cached],
        "torch": torch.get_rng_state().numpy().tobytes(),
        "cuda": [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
    }


def restore(state: dict[str, Any]) -> None:
    """Continue from states that :func:`capture` returned, possibly after a trip through msgpack."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.frombuffer(keys, "<u4"), position, has_gauss, cached))
    torch.set_rng_state(_tensor(state["torch"]))
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([_tensor(one) for one in state["cuda"]])


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
