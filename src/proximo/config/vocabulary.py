"""The words of a run: short names of fields, the same on the command line, in TOML and in Python.

One table for all: flags, files, keyword arguments, help, errors and the documentation are made from it. A word stands
for exactly one field of each kind of config; the fields themselves can always be given by their whole names. Names of
other libraries are no words: they are answered with ours.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

KINDS = {
    "train": ("train", "init", "selfcheck", "plan", "iterate", "fork"),
    "sft": ("sft",),
    "dpo": ("dpo",),
    "reward-model": ("reward-model",),
    "eval": ("eval",),
}
"""Kinds of configs, and the commands that read them."""


@dataclass(frozen=True)
class Word:
    """A short name of one field."""

    name: str
    meaning: str
    fields: Mapping[str, str]
    """The field's dotted name in each kind of config that has one."""
    takes: str = "STR"
    """Values: INT, FLOAT, STR, several of these, one in brackets that may be left out; empty: it is a switch."""
    also: str = ""
    """A second spelling."""
    of_stages: str = ""
    """The meaning where files are learned from, if it is another."""

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def flags(self) -> list[str]:
        """The flag, and its second spelling."""
        return [self.flag, *[f"--{self.also}"] * bool(self.also)]


def _all_stages(field: str, **others: str) -> dict[str, str]:
    return {**dict.fromkeys(("sft", "dpo", "reward-model"), field), **others}


WORDS = (
    Word(
        "learning_rate",
        "AdamW's learning rate",
        _all_stages("fit.learning_rate", train="training.learning_rate"),
        "FLOAT",
        also="lr",
    ),
    Word(
        "max_tokens",
        "most tokens of a completion",
        _all_stages("data.max_tokens", train="sampling.max_tokens", eval="sampling.max_tokens"),
        "INT",
        of_stages="most tokens of prompt and completion together",
    ),
    Word("group_size", "completions of each prompt", {"train": "training.group_size"}, "INT"),
    Word(
        "batch",
        "prompts of a step",
        _all_stages("fit.batch", train="training.groups"),
        "INT",
        of_stages="rows of a step",
    ),
    Word(
        "epochs",
        "passes over the data, in the place of --steps",
        _all_stages("fit.epochs", train=""),
        "FLOAT",
        of_stages="passes over the data",
    ),
    Word(
        "temperature",
        "sampling temperature",
        {"train": "sampling.temperature", "eval": "sampling.temperature"},
        "FLOAT",
    ),
    Word("kl", "coefficient of the KL penalty in the loss; 0: none", {"train": "algorithm.kl.coefficient"}, "FLOAT"),
    Word("beta", "strength of DPO's implicit KL to the reference", {"dpo": "loss.beta"}, "FLOAT"),
    Word(
        "lora",
        "rank of a LoRA adapter, trained in the place of the weights",
        _all_stages("adapter.rank", train="adapter.rank"),
        "[INT]",
    ),
    Word("system", "system prompt before each prompt", {"train": "task.system", "eval": "task.system"}),
    Word("template", "text of the prompt, with columns in braces", {"train": "task.template", "eval": "task.template"}),
    Word("chat", "format with the model's chat template, or not", {"train": "task.chat", "eval": "task.chat"}, ""),
    Word(
        "environment",
        "FILE.py:CLASS that answers replies, in several turns",
        {"train": "environment.path", "eval": "environment.path"},
    ),
    Word(
        "tools",
        "FILE.py:FUNCTION ... that the policy may call",
        {"train": "environment.tools", "eval": "environment.tools"},
        "STR ...",
    ),
    Word(
        "max_turns",
        "replies of an episode at most",
        {"train": "environment.max_turns", "eval": "environment.max_turns"},
        "INT",
    ),
    Word(
        "warmup_steps",
        "steps in which the learning rate rises from 0",
        _all_stages("fit.warmup_steps", train="training.warmup_steps"),
        "INT",
    ),
    Word(
        "weight_decay", "AdamW's weight decay", _all_stages("fit.weight_decay", train="training.weight_decay"), "FLOAT"
    ),
    Word(
        "token_budget",
        "tokens of a forward pass: memory, not results",
        _all_stages("fit.token_budget", train="training.token_budget"),
        "INT",
    ),
)
BY_NAME = {name: word for word in WORDS for name in (word.name, word.also) if name}


def kind_of(command: str) -> str | None:
    """The kind of config that a command reads; None where it reads none that has words."""
    return next((kind for kind, commands in KINDS.items() if command in commands), None)


def words_of(kind: str) -> Iterator[tuple[Word, str]]:
    """The words of a kind of config, each with its field; the field is empty where more than one value is set."""
    return ((word, word.fields[kind]) for word in WORDS if kind in word.fields)


def field_of(kind: str, name: str) -> str | None:
    """The field of a word; None where the kind has no such word.

    Example: field_of("sft", "lr") == "fit.learning_rate"
    """
    word = BY_NAME.get(name)
    return None if word is None else word.fields.get(kind)


def fields_by_word(kind: str) -> dict[str, str]:
    """The field of each word of a kind of config, by every spelling; those that set more than one value have none."""
    return {name: field for word, field in words_of(kind) if field for name in (word.name, word.also) if name}


OF_STAGES = {
    "evaluation.every": "fit.evaluate_every",
    "evaluation.patience": "fit.patience",
    "evaluation.metric": "fit.metric",
}
"""Fields of training, and what stages that learn from files call them; those of the table training are in fit."""


def names_in_stages(field: str) -> list[str]:
    """Dotted names that a field of training may have in a stage.

    Example: names_in_stages("training.adam_beta1") == ["training.adam_beta1", "fit.adam_beta1"]
    """
    return [field, OF_STAGES.get(field, field.replace("training.", "fit.", 1))]


# Names that other libraries have for the same


@dataclass(frozen=True)
class Foreign:
    """A name of TRL, verl, OpenRLHF, prime-rl or another library, and what to give here."""

    ours: str
    """The word or dotted field; empty: nothing has to be given."""
    remark: str = ""

    def in_words(self, ours: str) -> str:
        """The answer in words; `ours` is how to give it here."""
        return f"here it is {ours}{self.remark and ', ' + self.remark}" if ours else self.remark


_FOREIGN = (
    ("model", "model_name_or_path model_id model_name pretrain base_model actor_model_name_or_path", ""),
    ("data", "dataset dataset_name train_dataset train_files prompt_data input_data dataset_path", ""),
    ("eval_data", "eval_dataset val_files test_files validation_data eval_dataset_name", ""),
    ("run", "output_dir default_local_dir save_path ckpt_path save_dir out_dir checkpoint_dir", ""),
    (
        "reward",
        "reward_funcs reward_func reward_fn reward_function custom_reward_function remote_rm_url compute_score",
        "",
    ),
    ("reward", "reward_weights", "as FILE.py:NAME=WEIGHT"),
    (
        "group_size",
        "num_generations n rollout_n n_samples_per_prompt rollouts_per_example num_return_sequences group_n "
        "samples_per_prompt num_rollouts num_samples_per_prompt",
        "",
    ),
    (
        "max_tokens",
        "max_completion_length max_new_tokens max_response_length generate_max_len max_gen_len response_length "
        "max_completion_tokens max_length max_seq_length max_seq_len seq_len max_len",
        "",
    ),
    ("batch", "generation_batch_size", "in prompts; TRL counts completions, so divide by num_generations"),
    (
        "batch",
        "train_batch_size rollout_batch_size batch_size prompts_per_step micro_rollout_batch_size global_batch_size",
        "",
    ),
    (
        "token_budget",
        "per_device_train_batch_size micro_batch_size micro_train_batch_size ppo_micro_batch_size "
        "ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu",
        "memory only: results do not depend on it",
    ),
    (
        "",
        "gradient_accumulation_steps grad_accum",
        "not needed: memory decides how many passes an update takes, and --token-budget bounds it",
    ),
    (
        "",
        "gradient_checkpointing enable_gradient_checkpointing activation_checkpointing",
        "not needed: layers are computed again by themselves where a GPU's memory asks for it",
    ),
    (
        "",
        "deepspeed zero_stage fsdp fsdp_config accelerate_config",
        "not needed: --ranks N holds the model in shards on N processes",
    ),
    (
        "",
        "bf16 fp16 tf32",
        "give --dtype bfloat16 or --dtype float32; by itself a GPU takes bfloat16 with float32 master weights",
    ),
    (
        "",
        "use_vllm vllm_mode vllm_gpu_memory_utilization vllm_server_base_url gpu_memory_utilization",
        "not needed: the built-in sampler uses the learner's own weights; --sampler.type Fleet takes vLLM servers",
    ),
    (
        "",
        "resume_from_checkpoint resume_mode load_checkpoint auto_resume",
        "not needed: proximo resume RUN goes on with a run, and so does the same command again",
    ),
    (
        "",
        "log_completions log_rollouts logging_steps logging_first_step",
        "not needed: every step and every completion is stored; proximo view shows them",
    ),
    (
        "",
        "remove_unused_columns dataloader_num_workers shuffle_dataset",
        "not needed: rewards see every column, and prompts come in an order that follows from --seed",
    ),
    ("", "callbacks trainer_callbacks", "in Python, on_step=f(step, metrics) is called after each step"),
    ("algorithm.keep.truncated", "mask_truncated_completions overlong_filtering", "False leaves them out of the loss"),
    ("epochs", "num_train_epochs total_epochs num_epochs max_epochs num_episodes", ""),
    ("training.epochs", "num_iterations ppo_epochs num_ppo_epochs mu", "passes over each step's completions"),
    ("training.minibatches", "steps_per_generation num_mini_batches", "updates of a step"),
    ("training.minibatches", "ppo_mini_batch_size", "a number of updates: train_batch_size / ppo_mini_batch_size"),
    ("steps", "max_steps total_training_steps num_steps train_steps total_steps num_train_steps iterations", ""),
    ("learning_rate", "actor_learning_rate optim_lr step_size rate actor_lr", ""),
    ("warmup_steps", "lr_warmup_steps num_warmup_steps", ""),
    ("warmup_steps", "warmup_ratio lr_warmup_ratio lr_warmup_steps_ratio", "a number of steps"),
    (
        "training.learning_rate_schedule",
        "lr_scheduler_type lr_scheduler scheduler lr_schedule",
        "constant, linear or cosine",
    ),
    ("training.max_gradient_norm", "max_grad_norm grad_clip max_norm clip_grad gradient_clip_val", ""),
    ("training.adam_beta1", "adam_beta_1 beta1", ""),
    ("training.adam_beta2", "adam_beta_2 beta2", ""),
    (
        "training.adam_moments",
        "optim optimizer adam_8bit",
        "AdamW is the optimizer; 8bit keeps its moments in 8 bits",
    ),
    (
        "kl",
        "init_kl_coef kl_coef kl_loss_coef kl_coeff kl_beta kl_coefficient kl_ctrl use_kl_loss kl_penalty beta",
        "",
    ),
    ("algorithm.gate.high", "epsilon_high clip_ratio_high clip_high eps_clip_high", ""),
    (
        "algorithm.gate.low",
        "epsilon clip_ratio_low clip_ratio cliprange clip_range eps_clip clip_eps epsilon_low",
        "and algorithm.gate.high",
    ),
    ("algorithm.gate.dual", "delta clip_ratio_c", ""),
    (
        "algorithm",
        "loss_type adv_estimator advantage_estimator loss_mode importance_sampling_level algo",
        "`proximo explain --all` compares them",
    ),
    (
        "algorithm.advantage.type",
        "scale_rewards norm_adv_by_std_in_grpo",
        "GroupNormalized divides by the group's deviation, GroupCentred does not",
    ),
    ("algorithm.weights.type", "loss_agg_mode", "TokenMean, SequenceMean, SequenceSum or ConstantLength"),
    ("algorithm.keep.type", "filter_groups dynamic_sampling dynamic_filtering", "KeepMixed; dapo has it"),
    (
        "algorithm.correct.type",
        "rollout_correction vllm_importance_sampling_correction tis",
        "see docs/guides/mismatch.md",
    ),
    ("value.learning_rate", "critic_learning_rate critic_lr vf_lr", ""),
    ("value.pretrain_steps", "critic_warmup freezing_actor_steps", ""),
    ("lora", "lora_rank lora_r use_peft peft_config use_lora lora_config", ""),
    ("adapter.alpha", "lora_alpha", ""),
    ("adapter.targets", "lora_target_modules target_modules lora_targets", ""),
    ("adapter.quantize_base", "load_in_4bit load_in_8bit qlora use_qlora", "nf4 or int8"),
    ("dtype", "torch_dtype precision mixed_precision", ""),
    ("system", "system_prompt system_message", ""),
    ("template", "prompt_template chat_template input_template", ""),
    ("chat", "apply_chat_template use_chat_template", ""),
    ("task.chat_template_kwargs", "chat_template_args apply_chat_template_kwargs", ""),
    ("task.prompt_column", "prompt_key input_key prompt_field question_column dataset_text_field", ""),
    ("task.answer_columns", "label_key answer_key answer_field answer_column reward_model_key", ""),
    ("evaluation.every", "eval_steps test_freq eval_every eval_interval val_check_interval eval_freq", ""),
    ("checkpoints.every", "save_steps save_freq save_interval save_every", ""),
    ("checkpoints.keep", "save_total_limit max_ckpt_num max_actor_ckpt_to_keep", ""),
    ("evaluation.problems", "val_batch_size num_eval_examples max_eval_samples", ""),
    (
        "track",
        "report_to logger wandb use_wandb log_with wandb_project wandb_mode",
        "wandb, trackio, tensorboard or mlflow",
    ),
    ("environment", "env env_id environment_factory environment_id vf_env_id", ""),
    ("tools", "tool_config_path tool_funcs", ""),
    ("max_turns", "max_tool_calling_iterations max_assistant_turns max_user_turns", ""),
    ("ranks", "num_processes nproc_per_node n_gpus_per_node num_gpus gpus world_size nnodes", ""),
    ("sampler.tensor_parallel", "tensor_parallel_size tensor_model_parallel_size vllm_tensor_parallel_size tp", ""),
    ("ahead.staleness", "max_staleness max_async_level async_level off_policy_steps", ""),
    ("reward_model", "reward_model_path reward_pretrain rm_path reward_model_name_or_path", ""),
    ("evaluation.patience", "early_stopping_patience", ""),
    (
        "",
        "val_before_train eval_on_start do_eval eval_strategy",
        "not needed: the model is evaluated before and after; --evaluation.every N does it between",
    ),
    (
        "",
        "top_p top_k min_p",
        "refused in training: ratios would be taken against another distribution than tokens are drawn from; "
        "proximo eval takes them as --sampling.top-p",
    ),
    (
        "",
        "max_prompt_length prompt_max_len truncate_prompt",
        "not needed: prompts are never cut; a run says before it starts which are too long for the model, and "
        "--skip-bad leaves them out",
    ),
    ("", "attn_implementation flash_attn use_flash_attention", "not needed: attention is chosen for the machine"),
    (
        "",
        "packing sample_packing pack_sequences use_remove_padding",
        "not needed: rows are always packed without padding, and none sees another",
    ),
    ("algorithm.extra.type", "entropy_coeff entropy_coef ent_coef", "EntropyBonus, and --algorithm.extra.coefficient"),
    ("sampler.type", "rollout_name", "Fleet: vLLM servers; without it the sampler is built in"),
    ("", "overlong_buffer", "not needed: --algorithm dapo has the overlong penalty"),
    (
        "",
        "param_offload optimizer_offload optimizer_offload_fraction actor_strategy strategy",
        "not needed: --ranks N holds the model in shards on N processes",
    ),
    ("", "project_name experiment_name", "not needed: --run names the run, and trackers are told that name"),
    ("reference", "ref_model reference_model ref_model_path ref_model_name_or_path", ""),
    (
        "",
        "config config_file config_path config_name",
        "a config is named first, without a flag: `proximo train run.toml`; `proximo init --model MODEL --data DATA` "
        "writes one",
    ),
)
FOREIGN = {name: Foreign(ours, remark) for ours, names, remark in _FOREIGN for name in names.split()}
"""Names of other libraries. TRL's and verl's of November 2026, OpenRLHF's and prime-rl's."""


def foreign_names() -> Iterator[tuple[Foreign, list[str]]]:
    """The answers, each with the names that have it."""
    return ((Foreign(ours, remark), names.split()) for ours, names, remark in _FOREIGN)


_OF_KIND = {
    **{(stage, "steps"): Foreign("epochs", "a fraction is allowed") for stage in ("sft", "dpo", "reward-model")},
    **{
        (stage, "eval_data"): Foreign("data.held_out", "a file, or a share of the prompts")
        for stage in ("sft", "dpo", "reward-model")
    },
    ("dpo", "algorithm"): Foreign("loss.type", "Dpo or Ipo"),
    ("train", "reference"): Foreign("", "not needed: the reference is the model that training starts from"),
    ("eval", "group_size"): Foreign("samples", "completions of each problem"),
    ("eval", "evaluation.problems"): Foreign("problems"),
    ("eval", "eval_data"): Foreign("data"),
    ("eval", "model"): Foreign("", "the model comes first, without a flag: `proximo eval MODEL`"),
}
"""Answers of one kind of config, by the kind and what the name is elsewhere here."""


def foreign(name: str, kind: str = "") -> Foreign | None:
    """Answer to a name of another library, with its path left out and in any spelling; to one of ours that this kind
    of config has under another.

    Example: foreign("actor_rollout_ref.rollout.n").ours == "group_size"
    """
    plain = name.lstrip("-+").replace("-", "_")
    *_, last = plain.rpartition(".")
    if plain.endswith(("optim.lr", "optimizer.lr")):
        return Foreign("value.learning_rate" if "critic" in plain else "learning_rate")
    answer = FOREIGN.get(last.lower()) or _nested(plain.lower())
    return _OF_KIND.get((kind, last.lower() if answer is None else answer.ours), answer)


def _nested(path: str) -> Foreign | None:
    """Answer to a switch, size or name of a table, such as `filter_groups.enable`, by the table's own name."""
    *_, table, last = ["", "", *path.split(".")]
    if last == "name":
        return FOREIGN.get(f"{table}_{last}")
    return FOREIGN.get(table) if last in ("enable", "len") else None
