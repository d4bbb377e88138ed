"""vLLM, stepped in this process: the engine of a rollout child.

It drives vLLM's ``EngineCore`` (scheduler, paged KV cache, model) and nothing above it: no detokeniser, no output
processor, no log-prob lists. The model runner's sampler is replaced by :mod:`services.rollout.sampling`, whose log-probs
wait here until the step returns.

Invariants: a token's noise is keyed by (seed, index after the prompt), counted from the tokens that this engine has handed
out, so that a preempted and recomputed request draws the same again; a prefix cached under one policy is found only by
requests that were added under it; importing this module imports neither torch nor vllm, which read their environment
(:func:`engine_environment`) when they are first imported.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from libs.common.errors import ModelError
from libs.common.tokens import PolicyVersion
from services.rollout.engine import NewToken, StepReport, StopReason, TurnRequest
from services.rollout.stopping import StopWatch, load_tokenizer

MEGABYTE = 1 << 20
MAX_REASON = 500


def engine_environment(threads: int) -> dict[str, str]:
    """Environment variables that a process must have before it imports torch or vllm to run a :class:`VllmEngine`.

    Args:
        threads: compute threads at the start; :meth:`VllmEngine.set_threads` changes them later.
    """
    return {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore::FutureWarning",  # of torch's own renamings, which are vLLM's to follow
    }


class _Turn:
    """A turn in the engine."""

    __slots__ = ("handed_out", "logprob", "request", "watch")

    def __init__(self, request: TurnRequest, watch: StopWatch | None) -> None:
        self.request = request
        self.watch = watch
        self.handed_out = 0
        self.logprob = 0.0

    @property
    def position(self) -> int:
        """Index after the prompt of the next token."""
        return len(self.request.token_ids) + self.handed_out


class VllmEngine:
    """An :class:`~services.rollout.engine.Engine` on vLLM; needs the environment of :func:`engine_environment`."""

    def __init__(
        self,
        model: str,
        *,
        max_running: int,
        kv_memory_mb: int,
        dtype: Literal["bfloat16", "float32"] = "bfloat16",
        max_context: int | None = None,
        threads: int = 1,
        compile: bool = False,
    ) -> None:
        """Load a model.

        Args:
            model: directory in Hugging Face format.
            max_running: sequences in the batch at most.
            kv_memory_mb: KV cache, in MiB.
            dtype: of weights and KV cache.
            max_context: prompt and response together, in tokens; None takes the model's own limit.
            threads: compute threads.
            compile: ``torch.compile``: faster decode, a minute more to start.

        Raises:
            ModelError: vLLM can't load the model, or the KV cache can't hold one sequence of ``max_context``.
        """
        import torch

        self._torch_set_num_threads: Callable[[int], None] = torch.set_num_threads  # vLLM's CPU worker puts a no-op there
        self._model = model
        self._core = _build_core(
            model=model,
            skip_tokenizer_init=True,
            generation_config="vllm",
            dtype=dtype,
            seed=0,
            max_model_len=max_context,
            max_num_seqs=max_running,
            kv_cache_memory_bytes=kv_memory_mb * MEGABYTE,
            enforce_eager=not compile,
            enable_prefix_caching=True,
            async_scheduling=False,
            distributed_executor_backend="uni",
            enable_logging_iteration_details=True,
            use_tqdm_on_load=False,
        )
        torch.set_num_threads = self._torch_set_num_threads
        self.max_context = int(self._core.vllm_config.model_config.max_model_len)
        self._turns: dict[str, _Turn] = {}
        self._ids: dict[str, str] = {}
        self._added = 0
        self._policies = 0
        self._salt = "initial"
        self._tokenizer: Tokenizer | None = None
        self._install_sampler()
        self.set_threads(threads)

    def add(self, requests: Sequence[TurnRequest]) -> None:
        """Queue turns; see :meth:`Engine.add`. If one is refused, none is queued."""
        for request in requests:
            length = len(request.prompt_ids) + len(request.token_ids)
            if length >= self.max_context:
                raise ModelError(f"{request.key}: {length} tokens leave no room in a context window of {self.max_context}")
            if length == 0:
                raise ModelError(f"{request.key}: the prompt is empty")
            if request.key in self._ids:
                raise ModelError(f"{request.key}: already has a turn on this engine")
        for request in requests:
            self._queue(request)

    def drop(self, keys: Sequence[str]) -> None:
        """Forget turns at this step boundary; see :meth:`Engine.drop`."""
        self._abort([self._ids[key] for key in keys if key in self._ids])

    def busy(self) -> bool:
        """Whether a turn is running or waiting."""
        return bool(self._turns)

    def step(self) -> StepReport:
        """Run one engine step.

        Raises:
            ModelError: the policy's logits aren't finite.
        """
        if not self._turns:
            return StepReport(new=[], prefill_tokens=0, decode_tokens=0, running=0, waiting=0, kv_used=0.0)
        outputs, _ = self._core.step()
        outputs = outputs[0]
        stopped: list[str] = []
        new = [self._take(output, stopped) for output in outputs.outputs]
        self._abort(stopped)
        stats = outputs.scheduler_stats
        work = stats.iteration_details
        if work is None:
            prefill, decode, running = 0, 0, 0
        else:  # a preempted sequence counts as generating: all but one of its tokens are computed again
            decode, running = work.num_generation_requests, work.num_ctx_requests + work.num_generation_requests
            prefill = work.num_ctx_tokens + work.num_generation_tokens - decode
        return StepReport(
            new=new,
            prefill_tokens=prefill,
            decode_tokens=decode,
            running=running,
            waiting=stats.num_waiting_reqs + stats.num_skipped_waiting_reqs,
            kv_used=stats.kv_cache_usage,
        )

    def load_policy(self, version: PolicyVersion, directory: str) -> None:
        """Put a policy's weights in force between two steps; see :meth:`Engine.load_policy`.

        Raises:
            ModelError: the directory holds no safetensors.
        """
        if next(Path(directory).glob("*.safetensors"), None) is None:
            raise ModelError(f"{directory}: no safetensors of policy {version} there")
        self._core.collective_rpc("reload_weights", kwargs={"weights_path": directory})
        self._policies += 1
        self._salt = f"{version}/{self._policies}"

    def set_threads(self, count: int) -> None:
        """Compute with this many threads from the next step on, at most the cores that this process may run on."""
        self._torch_set_num_threads(max(1, min(count, len(os.sched_getaffinity(0)))))

    def close(self) -> None:
        """Free everything."""
        self._turns.clear()
        self._ids.clear()
        self._core.shutdown()

    def _queue(self, request: TurnRequest) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        watch = None
        if request.stop:
            self._tokenizer = self._tokenizer or load_tokenizer(self._model)
            watch = StopWatch(self._tokenizer, request.stop, request.token_ids[request.turn_start :])
        self._added += 1
        core_id = f"{request.key}#{self._added}"  # a key comes back with its next turn, perhaps before vLLM forgot the last
        core_request = EngineCoreRequest(
            request_id=core_id,
            prompt_token_ids=[*request.prompt_ids, *request.token_ids],
            mm_features=None,
            sampling_params=SamplingParams(
                temperature=0.0,  # the sampler is ours: the plainest parameters cost vLLM the least
                max_tokens=request.max_new_tokens,
                stop_token_ids=list(request.stop_token_ids),
                detokenize=False,
            ),
            pooling_params=None,
            arrival_time=float(self._added),
            lora_request=None,
            cache_salt=self._salt,
            data_parallel_rank=None,
        )
        self._turns[core_id] = _Turn(request, watch)
        self._ids[request.key] = core_id
        self._core.add_request(*self._core.preprocess_add_request(core_request))

    def _take(self, output: Any, stopped: list[str]) -> NewToken:
        """The new token of a request; its id goes to ``stopped`` when a stop string ends it and vLLM doesn't know."""
        from vllm.v1.engine import FinishReason

        turn = self._turns[output.request_id]
        (token_id,) = output.new_token_ids
        turn.handed_out += 1
        reason = None
        if output.finish_reason == FinishReason.STOP:
            reason = StopReason.STOP
        elif output.finish_reason is not None:
            budget_spent = turn.handed_out == turn.request.max_new_tokens
            reason = StopReason.LENGTH if budget_spent else StopReason.CONTEXT
        if reason is not StopReason.STOP and turn.watch is not None and turn.watch.completes(token_id):
            if reason is None:
                stopped.append(output.request_id)
            reason = StopReason.STOP
        if output.finish_reason is not None:
            self._forget(output.request_id)
        return NewToken(key=turn.request.key, token_id=token_id, logprob=turn.logprob, stopped=reason)

    def _abort(self, core_ids: list[str]) -> None:
        if core_ids:
            self._core.abort_requests(core_ids)
        for core_id in core_ids:
            self._forget(core_id)

    def _forget(self, core_id: str) -> None:
        del self._ids[self._turns.pop(core_id).request.key]

    def _install_sampler(self) -> None:
        """Put our sampling step in the place of the model runner's."""
        import torch
        from vllm.v1.outputs import SamplerOutput

        from services.rollout.sampling import Draw, sample

        runner = self._core.model_executor.driver_worker.worker.model_runner

        def sampler(*, logits: torch.Tensor, sampling_metadata: object) -> Any:
            """One id per row of the batch; the runner discards those of rows whose prefill isn't complete."""
            turns = [self._turns[core_id] for core_id in runner.input_batch.req_ids]
            draws = [
                Draw(seed=turn.request.seed, position=turn.position, temperature=turn.request.temperature) for turn in turns
            ]
            ids_B, logprobs_B = sample(logits, draws)
            for turn, logprob in zip(turns, logprobs_B.tolist(), strict=True):
                turn.logprob = logprob
            return SamplerOutput(sampled_token_ids=ids_B.to(torch.int32).unsqueeze(1), logprobs_tensors=None)

        runner.sampler = sampler


def _build_core(**settings: Any) -> Any:
    """The EngineCore of vLLM with the given engine arguments.

    Raises:
        ModelError: vLLM refuses the model or the settings.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    try:
        config = EngineArgs(**settings).create_engine_config()
        return EngineCore(config, Executor.get_class(config), log_stats=True)
    except (ValueError, OSError) as error:
        reason = " ".join(str(error).split())[:MAX_REASON] or type(error).__name__
        raise ModelError(f"{settings['model']}: vLLM can't load it: {reason}") from error
