"""The arguments of transformers' run_clm.py, which DeepSpeed and Accelerate launch alike.

Source: transformers examples/pytorch/language-modeling/run_clm.py; TrainingArguments.
"""

from __future__ import annotations

from parsolve.config import Config
from parsolve.launchers.base import Arguments, train_steps
from parsolve.problem import Problem


def add_run_clm(args: Arguments, problem: Problem, config: Config) -> None:
    """transformers' language-modelling example: a model of this shape with fresh weights."""
    workload = problem.workload
    name = " ".join(problem.model.name.split()) or "model"
    name = f"./{name}" if name.startswith("-") else name
    args.add("--config_name", name)
    args.add("--tokenizer_name", name)
    args.add("--dataset_name", "wikitext")
    args.add("--dataset_config_name", "wikitext-2-raw-v1")
    args.add("--block_size", workload.seq_len)
    args.add("--do_train")
    args.add("--max_steps", train_steps(problem, config))
    args.add("--per_device_train_batch_size", config.mbs)
    args.add("--gradient_accumulation_steps", config.grad_acc)
    args.add("--fp16" if workload.precision == "fp16" else "--bf16")
    args.add("--optim", "sgd" if workload.optimizer == "sgd" else "adamw_torch")
    args.add("--learning_rate", "1e-4")
    args.add("--weight_decay", "0.1")
    args.add("--lr_scheduler_type", "cosine")
    args.add("--max_grad_norm", "1.0")
    args.add("--logging_steps", 1)
    args.add("--save_strategy", "no")
    args.add("--output_dir", "output")
    args.note("run_clm.py is transformers' examples/pytorch/language-modeling/run_clm.py; any Trainer script does")
    args.note(f"--config_name and --tokenizer_name: the folder or hub name of {name} (config.json and tokenizer)")
