"""A job: what a user writes in TOML, read strictly, with errors that name file, key and what was expected.

This is the one place where a setting, its default and its bounds are decided.
"""

import json
import math
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from libs.common.errors import JobFileError
from libs.common.replay import ReplayedRollout, ReplayedTraining
from libs.common.strictness import first_unknown_key

Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Decay = Annotated[float, Meta(ge=0, lt=1)]
JobName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}\Z")]
FunctionPath = Annotated[str, Meta(pattern=r"^[A-Za-z_][\w.]*(:[A-Za-z_]\w*)?\Z")]


class _Section(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every section: immutable. Unknown keys are refused in a file, and ignored in a message."""


class ModelSection(_Section, frozen=True, kw_only=True):
    """Which model is trained.

    Attributes:
        path: a hub id, a directory in Hugging Face format, or a ``.gguf`` file.
        dtype: of the rollout engine's weights and of the trainer's autocast; master weights are fp32 always.
        max_context: tokens of prompt and response together; None takes the model's own limit.
    """

    path: Annotated[str, Meta(min_length=1)]
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    max_context: Count | None = None


class DataSection(_Section, frozen=True, kw_only=True):
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


class RolloutSection(_Section, frozen=True, kw_only=True):
    """How responses are generated and kept.

    Attributes:
        batch: prompts per step. group: samples per prompt.
        max_new_tokens: sampled tokens of a whole trajectory, over all its turns.
        max_turns: model turns of a trajectory.
        temperature: of training samples.
        stop: strings that end a turn besides the model's own end-of-sequence tokens.
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


class EnvironmentSection(_Section, frozen=True, kw_only=True):
    """What answers a model turn: a built-in environment's name, or ``package.module:Class`` from the node's allow-list.

    Attributes:
        timeout_s: an answer that takes longer fails the attempt.
    """

    name: FunctionPath = "single_turn"
    args: dict[str, Any] = {}
    timeout_s: Positive = 60.0


class RewardSection(_Section, frozen=True, kw_only=True):
    """What scores a finished trajectory: a built-in scorer's name, or ``package.module:function`` from the allow-list.

    Attributes:
        timeout_s: a scorer that takes longer is killed and the sample scored as failed.
    """

    function: FunctionPath = "last_number"
    args: dict[str, Any] = {}
    timeout_s: Positive = 10.0


class AlgorithmSection(_Section, frozen=True, kw_only=True):
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


class TrainSection(_Section, frozen=True, kw_only=True):
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


class EvalSection(_Section, frozen=True, kw_only=True):
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


class ScheduleSection(_Section, frozen=True, kw_only=True):
    """How the job shares the hardware.

    Attributes:
        priority: higher goes first.
        mode: ``sync`` trains each batch on its own policy version.
    """

    priority: int = 0
    mode: Literal["sync"] = "sync"


class Job(_Section, frozen=True, kw_only=True):
    """A whole job, as accepted."""

    name: JobName
    model: ModelSection
    data: DataSection
    rollout: RolloutSection = RolloutSection()
    environment: EnvironmentSection = EnvironmentSection()
    reward: RewardSection = RewardSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    train: TrainSection = TrainSection()
    eval: EvalSection | None = None
    schedule: ScheduleSection = ScheduleSection()


_AT = re.compile(r" - at `\$\.?(?P<key>[^`]*)`$")
_MISSING = re.compile(r"Object missing required field `(?P<field>[^`]+)`")


def load_job(path: Path) -> Job:
    """Read and check a job file (TOML, or JSON by its ending).

    Relative ``model.path`` (of files that exist) and ``data.path`` are resolved against the job file's folder.

    Raises:
        JobFileError: with file, key and what was expected.
    """
    file = str(path)
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
    except FileNotFoundError:
        raise JobFileError(file=file, key="", expected="no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise JobFileError(file=file, key="", expected=f"can't be read: {error}") from None
    try:
        raw = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise JobFileError(file=file, key="", expected=f"not valid {path.suffix.lstrip('.') or 'toml'}: {error}") from None
    return _anchored(job_from(raw, file=file), path.parent)


def job_from(raw: Any, *, file: str) -> Job:
    """Decode and check a job given as plain data; ``file`` names it in errors.

    Raises:
        JobFileError: with file, key and what was expected.
    """
    if (unknown := first_unknown_key(raw, Job)) is not None:
        raise JobFileError(file=file, key=unknown, expected="unknown key")
    try:
        job = msgspec.convert(raw, Job)
    except msgspec.ValidationError as error:
        key, expected = _explain(str(error))
        raise JobFileError(file=file, key=key, expected=expected) from None
    except OverflowError:
        raise JobFileError(file=file, key="", expected="has an integer that is too large for anything here") from None
    _check(job, file)
    return job


def _explain(message: str) -> tuple[str, str]:
    """Split msgspec's message into the dotted key and what was expected there."""
    at = _AT.search(message)
    key, text = (at["key"], message[: at.start()]) if at else ("", message)
    if missing := _MISSING.search(text):
        return ".".join(filter(None, [key, missing["field"]])), "required, but missing"
    return key, text[0].lower() + text[1:]


def _check(job: Job, file: str) -> None:
    """What types can't say: rules between keys."""

    def refuse(key: str, expected: str) -> None:
        raise JobFileError(file=file, key=key, expected=expected)

    for name, section in (("algorithm", job.algorithm), ("train", job.train), ("rollout", job.rollout)):
        for key in section.__struct_fields__:
            if isinstance(value := getattr(section, key), float) and not math.isfinite(value):
                refuse(f"{name}.{key}", f"a finite number is expected, not {value}")
    sections = {"data": job.data} | ({"eval.data": job.eval.data} if job.eval else {})
    for key, data in sections.items():
        if sum(source is not None for source in (data.path, data.dataset, data.task)) != 1:
            refuse(key, "exactly one of `path`, `dataset` and `task` is expected")
        if data.path is not None and Path(data.path).suffix not in (".jsonl", ".json", ".parquet"):
            refuse(f"{key}.path", f"a .jsonl or .parquet file is expected, not {data.path!r}")
        if "{prompt}" not in data.template:
            refuse(f"{key}.template", "must contain {prompt}")
    if job.model.max_context is not None and job.rollout.max_new_tokens >= job.model.max_context:
        refuse("rollout.max_new_tokens", "must leave room for the prompt in model.max_context")
    if job.rollout.temperature == 0:
        refuse("rollout.temperature", "must be above 0: greedy samples of a group are all alike, and nothing can be learned")
    if job.environment.name == "single_turn" and job.rollout.max_turns != 1:
        refuse("rollout.max_turns", "the single_turn environment has exactly 1 turn")
    if job.rollout.engine != "replay" and job.rollout.engine_args != ReplayedRollout():
        refuse("rollout.engine_args", 'only engine = "replay" has settings')
    if job.train.engine != "replay" and job.train.engine_args != ReplayedTraining():
        refuse("train.engine_args", 'only engine = "replay" has settings')


def _anchored(job: Job, folder: Path) -> Job:
    """The job with its relative paths made absolute, as seen from the job file's folder."""

    def anchor(section: DataSection) -> DataSection:
        if section.path is None:
            return section
        return msgspec.structs.replace(section, path=str((folder / section.path).resolve()))

    model = folder / job.model.path
    if model.exists():
        job = msgspec.structs.replace(job, model=msgspec.structs.replace(job.model, path=str(model.resolve())))
    evaluation = job.eval and msgspec.structs.replace(job.eval, data=anchor(job.eval.data))
    return msgspec.structs.replace(job, data=anchor(job.data), eval=evaluation)
