"""The sections of a job: every setting, its default and its bounds. This is the one place where they are decided."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from libs.common.lengths import Lengths
from libs.common.replay import ReplayedRollout, ReplayedTraining

Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Decay = Annotated[float, Meta(ge=0, lt=1)]
JobName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}\Z")]
FunctionPath = Annotated[str, Meta(pattern=r"^[A-Za-z_][\w.]*(:[A-Za-z_]\w*)?\Z")]


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every section: immutable. Unknown keys are refused in a file, and ignored in a message."""


class ModelSection(Section, frozen=True, kw_only=True):
    """Which model is trained.

    Attributes:
        path: a hub id, a directory in Hugging Face format, or a ``.gguf`` file.
        dtype: of the rollout engine's weights and of the trainer's autocast; master weights are fp32 always.
        max_context: tokens of prompt and response together; None takes the model's own limit.
    """

    path: Annotated[str, Meta(min_length=1)]
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    max_context: Count | None = None


class DataSection(Section, frozen=True, kw_only=True):
    """Where prompts come from: exactly one of ``path``, ``dataset`` and ``task``.

    Attributes:
        path: a ``.jsonl`` or ``.parquet`` file.
        dataset: a Hugging Face dataset id; ``split`` names the split.
        task: a reasoning-gym task; ``args`` are its settings, ``size`` and ``seed`` draw the rows.
        prompt, answer: the columns that hold the question and the reference answer.
        system: system message put before every prompt; "" for none.
        template: the user message, with ``{prompt}`` where the question goes.
        shuffle: order of each epoch drawn from ``train.seed``; otherwise as in the file.
        skip, take: use only ``take`` rows after the first ``skip`` (of the shuffled order ``split_seed`` if given): how one
            dataset gives disjoint training and held-out parts.
    """

    path: str | None = None
    dataset: str | None = None
    split: str = "train"
    task: str | None = None
    args: dict[str, Any] = {}
    size: Count = 1000
    seed: int = 0
    prompt: str = "prompt"
    answer: str = "answer"
    system: str = ""
    template: str = "{prompt}"
    shuffle: bool = True
    skip: Natural = 0
    take: Count | None = None
    split_seed: int | None = None


class RolloutSection(Section, frozen=True, kw_only=True):
    """How responses are generated and kept.

    Attributes:
        batch: prompts per step. group: samples per prompt.
        max_new_tokens: sampled tokens of a whole trajectory, over all its turns.
        max_turns: model turns of a trajectory.
        temperature: of training samples.
        stop: strings that end a turn besides the model's own end-of-sequence tokens.
        forced_lengths: every turn has the length that is drawn from this, whatever the model says, keyed by (seed of the
            trajectory, where the turn began): for benchmarks that compare schedules on the same work.
        checkpoint_tokens, checkpoint_ms: new tokens are stored at the latest after so many tokens or milliseconds.
        lease_s: how long a claimed trajectory stays claimed without renewal.
        max_attempts: failures of one sample (environment, tool) before it ends as failed.
        deadline_s: wall-clock limit of one trajectory once it is claimed.
        max_running: sequences of this job in one engine's batch.
        kv_memory_mb: KV cache of one engine; less if its allocation has less.
        compile: ``torch.compile`` in the engine: faster decode, a minute more to start.
        engine: ``vllm``, or ``replay`` to play drawn lengths without a model (tests and benchmarks).
        engine_args: settings of the replay, see :mod:`libs.common.replay`.
    """

    batch: Annotated[int, Meta(ge=1, le=65536)] = 16
    group: Annotated[int, Meta(ge=2, le=1024)] = 4
    max_new_tokens: Count = 256
    max_turns: Count = 1
    temperature: NonNegative = 1.0
    stop: list[Annotated[str, Meta(min_length=1)]] = []
    forced_lengths: Lengths | None = None
    checkpoint_tokens: Count = 32
    checkpoint_ms: Count = 500
    lease_s: Positive = 5.0
    max_attempts: Count = 3
    deadline_s: Positive = 3600.0
    max_running: Count = 64
    kv_memory_mb: Count = 512
    compile: bool = False
    engine: Literal["vllm", "replay"] = "vllm"
    engine_args: ReplayedRollout = ReplayedRollout()


class EnvironmentSection(Section, frozen=True, kw_only=True):
    """What answers a model turn: a built-in environment's name, or ``package.module:Class`` from the node's allow-list.

    Attributes:
        timeout_s: an answer that takes longer fails the attempt.
    """

    name: FunctionPath = "single_turn"
    args: dict[str, Any] = {}
    timeout_s: Positive = 60.0


class RewardSection(Section, frozen=True, kw_only=True):
    """What scores a finished trajectory: a built-in scorer's name, or ``package.module:function`` from the allow-list.

    Attributes:
        timeout_s: a scorer that takes longer is killed and the sample scored as failed.
    """

    function: FunctionPath = "last_number"
    args: dict[str, Any] = {}
    timeout_s: Positive = 10.0


class AlgorithmSection(Section, frozen=True, kw_only=True):
    """GRPO and its variants.

    Attributes:
        clip_low, clip_high: the policy ratio is clipped to [1 - clip_low, 1 + clip_high].
        kl_coef: weight of the KL penalty to the initial policy; 0 keeps no reference model.
        loss: ``token`` averages over all trained tokens of the step; ``sequence`` over each sequence first.
        normalise: ``std`` divides a group's centred rewards by their standard deviation; ``none`` doesn't.
        importance_cap: truncation of the engine-trainer importance weight; None switches the correction off.
        drop_zero_variance: leave groups whose rewards are all equal out of the batch.
        epochs: optimiser passes over one step's batch.
        minibatches: optimiser updates that one pass is divided into.
    """

    clip_low: NonNegative = 0.2
    clip_high: NonNegative = 0.2
    kl_coef: NonNegative = 0.0
    loss: Literal["token", "sequence"] = "token"
    normalise: Literal["std", "none"] = "std"
    importance_cap: Positive | None = 2.0
    drop_zero_variance: bool = False
    epochs: Count = 1
    minibatches: Count = 1


class TrainSection(Section, frozen=True, kw_only=True):
    """The optimiser, the micro-batches and what is kept.

    Attributes:
        steps: of the whole job.
        micro_batch_tokens: tokens that one forward pass may hold.
        checkpoint_every: steps between checkpoints; the last step always makes one.
        keep_last, keep_best: checkpoints kept by age and by evaluation reward (training reward without ``eval``).
        log_samples: completions logged as text per step.
        engine: ``torch``, or ``replay`` to let training take its time and change nothing (tests and benchmarks).
        engine_args: settings of the replay, see :mod:`libs.common.replay`.
    """

    steps: Count = 100
    learning_rate: Annotated[float, Meta(gt=0, le=1)] = 1e-6
    warmup_steps: Natural = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: NonNegative = 0.0
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    eps: Positive = 1e-8
    max_grad_norm: Positive = 1.0
    micro_batch_tokens: Count = 2048
    gradient_checkpointing: bool = False
    seed: int = 0
    checkpoint_every: Count = 10
    keep_last: Count = 1
    keep_best: Natural = 1
    log_samples: Natural = 4
    engine: Literal["torch", "replay"] = "torch"
    engine_args: ReplayedTraining = ReplayedTraining()


class EvalSection(Section, frozen=True, kw_only=True):
    """Held-out evaluation during training.

    Attributes:
        every: steps between evaluations; the first and the last policy are evaluated always.
        samples: responses per prompt. temperature: 0 is greedy.
        prompts: how many held-out prompts are used; None for all.
    """

    data: DataSection
    every: Count = 10
    samples: Count = 1
    temperature: NonNegative = 0.0
    prompts: Count | None = None


class ScheduleSection(Section, frozen=True, kw_only=True):
    """How the job shares the hardware.

    Attributes:
        priority: higher goes first.
        weight: how much its completion counts beside other jobs', where a policy plans.
        latency_bound: a step is to take at most so many times as long as it would alone; None: no bound.
        mode: ``sync`` trains each batch on its own policy version.
    """

    priority: int = 0
    weight: Positive = 1.0
    latency_bound: Annotated[float, Meta(ge=1)] | None = None
    mode: Literal["sync"] = "sync"
