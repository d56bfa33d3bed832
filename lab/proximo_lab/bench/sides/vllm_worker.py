# pyright: reportMissingImports=false
"""The process of vLLM's side. It runs in vLLM's own environment and imports nothing of Proximo.

It answers each line of its input with one line of JSON: first, after its start, with its version; then to `tokens` with
completions and their log-probs, to `turn` with the seconds of a rollout and the lengths of its completions.
"""

import json
import os
import sys
import time


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM prints to stdout, too
    with open(sys.argv[1]) as file:
        work = json.load(file)
    import vllm
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=work["model"],
        dtype=work["dtype"],
        skip_tokenizer_init=True,
        max_model_len=work["max_tokens"] + len(work["prompts"][0]),
        max_num_seqs=work["rows"],
        kv_cache_memory_bytes=work["kv_bytes"],
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
    )
    sampling = SamplingParams(
        n=work["siblings"],
        temperature=1.0,
        max_tokens=work["max_tokens"],
        ignore_eos=True,
        logprobs=0,  # of the sampled token alone
        detokenize=False,
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in work["prompts"]]
    clock = time.perf_counter if work["on_gpu"] else time.process_time

    def rollout():
        engine.reset_prefix_cache()  # as after an update
        start = clock()
        completions = engine.generate(prompts, sampling, use_tqdm=False)
        return clock() - start, [each.outputs for each in completions]

    answers.write(json.dumps({"version": vllm.__version__}) + "\n")
    for line in sys.stdin:
        seconds, completions = rollout()
        if line.strip() == "tokens":
            answer = {"completions": [[_logged(each) for each in siblings] for siblings in completions]}
        else:
            lengths = [len(each.token_ids) for siblings in completions for each in siblings]
            answer = {"seconds": seconds, "lengths": lengths}
        answers.write(json.dumps(answer) + "\n")


def _logged(completion):
    tokens = list(completion.token_ids)
    return tokens, [each[token].logprob for token, each in zip(tokens, completion.logprobs, strict=True)]


if __name__ == "__main__":  # vLLM starts processes that import this file again
    main()
