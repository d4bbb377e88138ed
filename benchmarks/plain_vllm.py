"""Plain vLLM on one core: generates the same prompts again whenever a line comes in, and answers when it is done.

``python -m benchmarks.plain_vllm``, started by :mod:`benchmarks.rollout_speed`. Stock ``LLM.generate`` with the engine
settings that the rollout path uses, the sampled token's log-prob, forced lengths, and without turning ids into text.
"""

import sys
from pathlib import Path

import msgspec


class Work(msgspec.Struct, frozen=True):
    """What to generate, as the one command-line argument (JSON).

    Attributes:
        prompts: ids, each prompt as often as it is sampled.
    """

    model: str
    prompts: list[list[int]]
    new_tokens: int
    max_running: int
    kv_memory_mb: int
    max_context: int


def main() -> None:
    """Load, say so, then generate once per line."""
    import torch
    from vllm import LLM, SamplingParams

    work = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Work)
    llm = LLM(
        model=work.model,
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype="bfloat16",
        max_model_len=work.max_context,
        max_num_seqs=work.max_running,
        kv_cache_memory_bytes=work.kv_memory_mb << 20,
        enforce_eager=True,
        async_scheduling=False,
        distributed_executor_backend="uni",
    )
    sampling = SamplingParams(
        temperature=1.0, max_tokens=work.new_tokens, ignore_eos=True, logprobs=0, detokenize=False, seed=None
    )
    prompts = [{"prompt_token_ids": ids} for ids in work.prompts]
    print("ready", torch.get_num_threads(), flush=True)
    for _ in sys.stdin:
        llm.reset_prefix_cache()  # a policy is new at every step: nothing of an earlier round may be found
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        print("done", sum(len(output.outputs[0].token_ids) for output in outputs), flush=True)


if __name__ == "__main__":
    main()
