"""The policy: fp32 master weights with fp32 gradients, and the compute copy that forward passes run on.

In bf16 the compute copy is cast from the masters once per update, and every micro-batch's bf16 gradients are added to the
masters' fp32 ones as soon as they exist. That is what autocast computes with its fp32 residual stream left out, 11 % faster
than autocast (which casts all weights again in every micro-batch), and the form in which the rollout engine runs the model.
In fp32 the compute copy is the masters.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from libs.common.errors import ModelError
from services.trainer import attention
from services.trainer.batches import MicroBatch
from services.trainer.head import HeadGradient, Scores, Slope, score
from services.trainer.model_files import companions


class Policy:
    """A causal language model that scores and trains on micro-batches.

    Args:
        directory: in Hugging Face format.
        dtype: of the compute copy.
        temperature: that logits are divided by.
        trainable: False for a reference model: no masters, no gradients.
        gradient_checkpointing: recompute activations in the backward pass.

    Raises:
        ModelError: the model can't be loaded, or isn't a plain causal language model.
    """

    def __init__(
        self,
        directory: Path,
        *,
        dtype: torch.dtype,
        temperature: float,
        trainable: bool = True,
        gradient_checkpointing: bool = False,
    ) -> None:
        self.directory, self.dtype, self.temperature = directory, dtype, temperature
        attention.register()
        model = _load(directory, dtype=torch.float32 if trainable else dtype)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model.to(self.device).eval()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0  # checkpointing needs train mode; the ratio to the old log-probs must not carry noise
        self._model = model
        self._body, self._head = model.base_model, model.get_output_embeddings().weight
        self.masters: dict[str, torch.nn.Parameter] = {}
        if not trainable:
            model.requires_grad_(False)
            return
        self._separate_masters()
        if gradient_checkpointing:
            model.train()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def _separate_masters(self) -> None:
        """Keep the loaded fp32 weights as masters, and cast the model to the compute dtype."""
        fp32 = {name: parameter.detach() for name, parameter in self._model.named_parameters()}
        if self.dtype == torch.float32:
            self.masters = dict(self._model.named_parameters())
        else:
            self.masters = {name: torch.nn.Parameter(weight) for name, weight in fp32.items()}
            for name, parameter in self._model.named_parameters():
                parameter.data = fp32[name].to(self.dtype)
                parameter.register_post_accumulate_grad_hook(self._collector(self.masters[name]))
        for master in self.masters.values():
            master.grad = torch.zeros_like(master)
        head = next(name for name, parameter in self._model.named_parameters() if parameter is self._head)
        self._head_master = self.masters[head]

    @staticmethod
    def _collector(master: torch.nn.Parameter) -> Callable[[torch.Tensor], None]:
        """A hook that moves a compute gradient into the master's fp32 one."""

        def collect(parameter: torch.Tensor) -> None:
            if master.grad is not None and parameter.grad is not None:
                master.grad.add_(parameter.grad)
            parameter.grad = None

        return collect

    def _hidden(self, batch: MicroBatch) -> torch.Tensor:
        """Final hidden states [M, D] at the predicting positions."""
        output = self._body(
            input_ids=batch.ids_N[None],
            position_ids=batch.positions_N[None],
            use_cache=False,
            rows=batch.rows,
            source_N=batch.source_N,
        )
        hidden_ND: torch.Tensor = output.last_hidden_state[0]
        return hidden_ND.index_select(0, batch.predictor_M)

    @torch.no_grad()
    def score(self, batch: MicroBatch) -> Scores:
        """Log-probs and entropies of the batch's trained tokens."""
        return score(self._hidden(batch), self._head, batch.target_M, temperature=self.temperature)

    def train(self, batch: MicroBatch, slope: Slope) -> Scores:
        """As :meth:`score`, adding the gradient of the loss with derivative ``slope`` to the masters' gradients."""
        hidden_MD = self._hidden(batch)
        head_gradient = self._head_master.grad
        if head_gradient is None:
            raise ModelError("a policy without gradients can't be trained")
        gradient = HeadGradient(slope=slope, into_VD=head_gradient, hidden_MD=torch.empty_like(hidden_MD))
        scores = score(hidden_MD, self._head, batch.target_M, temperature=self.temperature, gradient=gradient)
        torch.autograd.backward(hidden_MD, gradient.hidden_MD)
        return scores

    def clear_gradients(self) -> None:
        """Set all gradients to 0, in place."""
        torch._foreach_zero_([master.grad for master in self.masters.values() if master.grad is not None])

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast the masters into the compute copy; due after every change of the masters."""
        if self.dtype != torch.float32:
            copies = dict(self._model.named_parameters())
            torch._foreach_copy_([copies[name] for name in self.masters], list(self.masters.values()))

    @torch.no_grad()
    def load_masters(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take over fp32 weights by the masters' names.

        Raises:
            ModelError: names or shapes differ from the model's.
        """
        if {name: tensor.shape for name, tensor in weights.items()} != {n: p.shape for n, p in self.masters.items()}:
            raise ModelError("the checkpoint's weights belong to another model")
        for name, master in self.masters.items():
            master.copy_(weights[name])
        self.refresh()

    def write(self, directory: Path) -> None:
        """Write the compute copy as a Hugging Face directory that transformers and vLLM load; not fsynced.

        Config, tokenizer and generation settings are the source model's.

        Raises:
            ModelError: it can't be written.
        """
        weights = {name: parameter.detach() for name, parameter in self._model.named_parameters()}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
            (directory / "model.safetensors").chmod(0o644)  # safetensors makes it private; engines may be other users
            self.write_companions(directory, dtype=self.dtype)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"the policy can't be written to {directory}: {error}") from error

    def write_companions(self, directory: Path, *, dtype: torch.dtype = torch.float32) -> None:
        """What makes weights of this ``dtype`` a model that others load: config, tokenizer and generation settings."""
        for source in companions(self.directory):
            if source.name != "config.json":
                shutil.copyfile(source, directory / source.name)
        config = json.loads((self.directory / "config.json").read_text(encoding="utf-8"))
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
        (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _load(directory: Path, *, dtype: torch.dtype) -> Any:
    """The model in this dtype, with row attention."""
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(directory), dtype=dtype, attn_implementation=attention.NAME, local_files_only=True
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"{directory}: can't be loaded for training: {error}") from error
    head, config = model.get_output_embeddings(), model.config
    if head is None or head.bias is not None:
        raise ModelError(f"{directory}: models whose language-model head has a bias can't be trained")
    if getattr(config, "final_logit_softcapping", None) or getattr(config, "logit_scale", None):
        raise ModelError(f"{directory}: models that rescale or cap their logits can't be trained")
    return model
