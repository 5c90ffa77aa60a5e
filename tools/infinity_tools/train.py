"""`infinity train`: its options, and how they become settings."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Annotated, Any

import typer

from infinity.cli_errors import Command, Version, at_most, failures, finite, setting
from infinity_tools.preset_list import list_presets
from infinity_tools.shared_options import setting_option, shared_option

_MODEL, _DATA, _STATE, _OPTIMIZER, _OUTPUT = "Model", "Data", "State on NVMe", "Optimizer", "Output"


def train(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Option(
            help="A preset (`--model list` lists them), a transformers config.json (random weights), or a "
            "folder written by save_pretrained, whose weights are streamed from disk.",
            rich_help_panel=_MODEL,
        ),
    ] = "llama-100m",
    strict: Annotated[
        bool,
        typer.Option(
            help="Reject a pretrained folder with missing or unexpected weights. With --no-strict, initialize "
            "missing weights and ignore unexpected ones.",
            rich_help_panel=_MODEL,
        ),
    ] = True,
    dtype: Annotated[
        str,
        typer.Option(
            help="Compute dtype: bf16 (with gradient reduction and updates in fp32), fp32, or auto (bf16 if "
            "the processor supports it).",
            rich_help_panel=_MODEL,
        ),
    ] = "auto",
    lora: Annotated[
        str | None,
        typer.Option(
            metavar="r=16[,alpha=32][,dropout=0.05][,targets=q_proj+v_proj]",
            help="Freeze the model and train LoRA adapters of rank r on its linear layers except the head, or "
            "on the layers in targets. Without alpha, alpha = 2 r. `infinity export` writes a peft "
            "adapter.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    activation_checkpointing: Annotated[bool, shared_option("activation_checkpointing", _MODEL)] = False,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="Training data; can be repeated. Either a dataset (a parquet, jsonl, json, csv or arrow file,"
            " a folder of such files, or a folder written by Dataset.save_to_disk) or plain text (a file "
            "or a folder of files, tokenized as bytes unless the model has a tokenizer.json). [default: "
            "the source code of Python's standard library]",
            rich_help_panel=_DATA,
        ),
    ] = None,
    split: Annotated[
        str,
        typer.Option(
            help="Dataset split to train on. [default: train, or the only split]",
            rich_help_panel=_DATA,
            show_default=False,
        ),
    ] = "",
    text_column: Annotated[
        str,
        typer.Option(
            help="Dataset column with texts or chats. [default: the first of these that exists: messages; "
            "prompt and completion; text; the only text column]",
            rich_help_panel=_DATA,
            show_default=False,
        ),
    ] = "",
    loss_on: Annotated[
        str,
        typer.Option(
            help="Tokens that contribute to the loss: completions (the completion after a prompt, or the "
            "assistant messages of a chat) or all.",
            rich_help_panel=_DATA,
        ),
    ] = "completions",
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="Folder with the tokenizer and chat template. [default: the --model folder]", rich_help_panel=_DATA
        ),
    ] = None,
    epochs: Annotated[
        float | None,
        typer.Option(
            help="Number of passes over the dataset, each in a different order; replaces --steps.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    eval_data: Annotated[
        list[Path] | None,
        typer.Option(
            help="Evaluation data, in the same formats as --data; can be repeated.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    eval_split: Annotated[
        str,
        typer.Option(
            help="Dataset split to evaluate on, from --eval-data or else from --data. [default: the "
            "first of validation, test and eval that exists, or the only split of --eval-data]",
            rich_help_panel=_DATA,
            show_default=False,
        ),
    ] = "",
    eval_every: Annotated[
        int,
        typer.Option(
            min=0,
            help="Number of steps between evaluations. 0: evaluate only after the last step.",
            rich_help_panel=_DATA,
        ),
    ] = 0,
    batch_tokens: Annotated[int, shared_option("batch_tokens", _DATA)] = 512,
    micro_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens per micro-batch of a rank. Each layer processes all micro-batches of a step before "
            "the next layer starts, and recomputes them in backward. Activation memory is then limited to"
            " one micro-batch plus the layer inputs, and NVMe traffic does not depend on --batch-tokens. "
            "[default: all tokens of a rank, not split]",
            rich_help_panel=_DATA,
        ),
    ] = None,
    loss_tokens: Annotated[int | None, shared_option("loss_tokens", _DATA)] = None,
    seq: Annotated[
        int,
        typer.Option(
            min=2,
            help="Tokens per sequence. Texts are concatenated and cut into sequences. Chats and completions "
            "are packed whole, as many as fit; longer ones are truncated at the end.",
            rich_help_panel=_DATA,
        ),
    ] = 256,
    seed: Annotated[
        int | None,
        typer.Option(
            callback=setting("run.seed"),
            help="Random seed for initialization and batch order. [default: 0]",
            rich_help_panel=_DATA,
        ),
    ] = None,
    nvme: Annotated[
        list[Path] | None,
        typer.Option(
            help="Folder for the state; repeat to spread the state over several drives. [default: OUT/nvme]",
            rich_help_panel=_STATE,
        ),
    ] = None,
    host_memory: Annotated[str | None, setting_option("memory.host_bytes", _STATE)] = None,
    page_bytes: Annotated[str | None, setting_option("memory.page_bytes", _STATE)] = None,
    state_format: Annotated[str | None, setting_option("state.format", _STATE)] = None,
    engine: Annotated[str | None, setting_option("storage.engine", _STATE)] = None,
    update: Annotated[str | None, setting_option("update.schedule", _STATE)] = None,
    checkpoint_every: Annotated[
        int,
        typer.Option(
            min=0,
            help="Number of steps between checkpoints. 0: write only one, when the run ends (after the last "
            "step or on a signal). With --keep never, no checkpoint is written at the end.",
            rich_help_panel=_STATE,
        ),
    ] = 0,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="[auto|RUN]",
            help="Resume from the newest checkpoint in the --nvme folders, or from the newest checkpoint of "
            "the run with id RUN. auto: resume if there is a checkpoint, and start a new run otherwise.",
            rich_help_panel=_STATE,
        ),
    ] = None,
    override: Annotated[
        bool,
        typer.Option(
            "--override",
            help="With --resume: let --lr, --weight-decay, --warmup-steps, --lr-steps and --max-grad-norm "
            "override the values stored in the checkpoint. By default, the stored values are used.",
            rich_help_panel=_STATE,
        ),
    ] = False,
    resume_path: Annotated[
        list[Path] | None,
        typer.Option(
            help="With --resume: folder of the run to resume, if it is not in --nvme; repeat for each folder "
            "of that run.",
            rich_help_panel=_STATE,
        ),
    ] = None,
    resume_step: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="With --resume: resume from the checkpoint of this step, and remove later checkpoints. "
            "[default: the newest checkpoint]",
            rich_help_panel=_STATE,
        ),
    ] = None,
    activations: Annotated[str | None, setting_option("activations.tier", _STATE)] = None,
    retained_checkpoints: Annotated[int | None, setting_option("run.retained_checkpoints", _STATE)] = None,
    keep: Annotated[str | None, setting_option("run.keep", _STATE)] = None,
    steps: Annotated[
        int,
        typer.Option(min=1, help="Total number of steps, including those before a resume.", rich_help_panel=_OPTIMIZER),
    ] = 20,
    lr: Annotated[
        float | None,
        typer.Option(
            min=0, callback=finite, help="Peak learning rate of AdamW. [default: 3e-4]", rich_help_panel=_OPTIMIZER
        ),
    ] = None,
    warmup_steps: Annotated[
        int | None,
        typer.Option(min=0, help="Number of linear warmup steps. [default: 4]", rich_help_panel=_OPTIMIZER),
    ] = None,
    lr_steps: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Step at which cosine decay reaches a tenth of --lr. 0: the last step, as set when the run was "
            "started. [default: 0]",
            rich_help_panel=_OPTIMIZER,
        ),
    ] = None,
    weight_decay: Annotated[
        float | None,
        typer.Option(min=0, callback=finite, help="Weight decay of AdamW. [default: 0.1]", rich_help_panel=_OPTIMIZER),
    ] = None,
    max_grad_norm: Annotated[float | None, shared_option("max_grad_norm", _OPTIMIZER)] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for summary.json, summary.png and steps.jsonl. A folder with the results of an "
            "earlier run requires --resume. [default: runs/YYYYMMDD-HHMMSS]",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    log: Annotated[
        list[str] | None,
        typer.Option(help="Also log to tensorboard or wandb; can be repeated.", rich_help_panel=_OUTPUT),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Serve Prometheus metrics of this node's ranks on this port. 0: any free port. [default: do "
            "not serve metrics]",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    metrics_host: Annotated[
        str,
        typer.Option(
            help="Address on which metrics are served, without authentication. 0.0.0.0: all addresses.",
            rich_help_panel=_OUTPUT,
        ),
    ] = "127.0.0.1",
    metrics_linger: Annotated[
        float,
        typer.Option(
            min=0,
            callback=at_most(10**6),
            help="Seconds to keep serving metrics after the summary has been written.",
            rich_help_panel=_OUTPUT,
        ),
    ] = 0.0,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Write a timeline for ui.perfetto.dev to this JSON file; ranks other than 0 append their rank"
            " to the file name.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print only the summary, as JSON.", rich_help_panel=_OUTPUT)
    ] = False,
    config: Annotated[Path | None, shared_option("config")] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks to start on this machine, as with torchrun.")
    ] = None,
    threads: Annotated[int, typer.Option(min=0, max=4096, help="CPU threads per rank. 0: PyTorch's default.")] = 0,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Version = False,
) -> None:
    """Train a causal language model with parameters and optimizer state on NVMe.

    To train on 8 GPUs of this machine, pass `--nproc 8`. For several nodes, use `torchrun --nnodes 2 --nproc-per-node 8
    … -m infinity_tools train …`.
    """
    with failures(debug=debug):
        if nproc is not None:
            from infinity_tools.launch import launch

            raise typer.Exit(launch(nproc, ["train", *_words(context, without={"nproc"})]))
        from infinity import load_config
        from infinity.errors import ConfigError
        from infinity.store.marker import is_run_id
        from infinity_tools.loop import run_training
        from infinity_tools.lora_options import check_lora
        from infinity_tools.options import TrainOptions

        if model == "list":
            list_presets(json=json)
            return
        if dtype not in ("auto", "bf16", "fp32"):
            raise ConfigError(f"--dtype {dtype!r} is not one of auto, bf16, fp32")
        if resume is not None and resume not in ("latest", "auto") and not is_run_id(resume):
            raise ConfigError(
                f"--resume {resume!r} is not valid; use no value, auto, or a run id (`infinity store ls` lists them)"
            )
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ConfigError(
                f"--max-grad-norm {max_grad_norm:g} must be greater than 0; omit it to train without clipping"
            )
        if retained_checkpoints == 0 and (keep != "never" or checkpoint_every):
            raise ConfigError(
                "--retained-checkpoints 0 leaves no space for the final checkpoint or --checkpoint-every; add --keep "
                "never and omit --checkpoint-every, or use --retained-checkpoints 1"
            )
        if retained_checkpoints and keep == "never" and not checkpoint_every:
            raise ConfigError(
                f"--retained-checkpoints {retained_checkpoints} has no effect with --keep never; add "
                "--checkpoint-every, or omit one of the two"
            )
        recipe = {
            "lr": lr,
            "lr_steps": lr_steps,
            "warmup_steps": warmup_steps,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
        }
        changes: dict[str, Any] = {
            "storage.paths": [str(path) for path in nvme] if nvme else None,
            "storage.engine": engine,
            "memory.host_bytes": host_memory,
            "memory.page_bytes": page_bytes,
            "state.format": state_format,
            "update.schedule": update,
            "activations.tier": activations,
            "run.seed": seed,
            "run.resume": resume,
            "run.resume_paths": [str(path) for path in resume_path] if resume_path else None,
            "run.resume_step": resume_step,
            "run.retained_checkpoints": retained_checkpoints,
            "run.keep": keep,
            "telemetry.timeline": str(trace) if trace else None,
        }
        settings = load_config(config).with_values(
            **{name: value for name, value in changes.items() if value is not None}
        )
        if not settings.run.resume:
            for option, value in (("--resume-step", resume_step), ("--resume-path", resume_path and resume_path[0])):
                if value is not None:
                    raise ConfigError(f"{option} {value} requires --resume")
            if override:
                raise ConfigError("--override requires --resume")
        options = TrainOptions(
            model=model,
            strict=strict,
            data=tuple(data or ()),
            split=split,
            text_column=text_column,
            loss_on=loss_on,
            tokenizer=tokenizer,
            lora=check_lora(lora) if lora is not None else None,
            epochs=epochs,
            eval_data=tuple(eval_data or ()),
            eval_split=eval_split,
            eval_every=eval_every,
            log=tuple(log or ()),
            out=out,
            batch_tokens=batch_tokens,
            micro_tokens=micro_tokens,
            loss_tokens=loss_tokens,
            seq=seq,
            steps=steps,
            given={name: value for name, value in recipe.items() if value is not None},
            override=override,
            said=_said(context),
            again=_words(context, without=_ANEW),
            checkpoint_every=checkpoint_every,
            dtype=dtype,
            activation_checkpointing=activation_checkpointing,
            threads=threads,
            metrics_port=metrics_port,
            metrics_host=metrics_host,
            metrics_linger=metrics_linger,
            json=json,
        )
        status = run_training(options, settings)
    raise typer.Exit(status)


class TrainCommand(Command):
    """Takes `--resume` with and without a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse."""
        following = [*args, "--"][1:]
        alone = [arg == "--resume" and after.startswith("-") for arg, after in zip(args, following, strict=True)]
        return super().parse_args(ctx, ["--resume=latest" if it else arg for arg, it in zip(args, alone, strict=True)])


app = typer.Typer(add_completion=False, rich_markup_mode=None)
app.command(cls=TrainCommand)(train)


_ANEW = {
    "resume", "resume_path", "resume_step", "override", "steps", "out", "trace", "json", "debug",
    "lr", "lr_steps", "warmup_steps", "weight_decay", "max_grad_norm", "epochs", "nproc",
}  # fmt: skip
"""Options that a command that goes on does not repeat: it has its own, or the checkpoint has them."""


def _said(context: typer.Context) -> frozenset[str]:
    """Return the names of the options that the command line has said."""
    names = [option.name or "" for option in context.command.params]
    sources = {name: context.get_parameter_source(name) for name in names}
    return frozenset(name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE")


def _words(context: typer.Context, *, without: Container[str]) -> tuple[str, ...]:
    """Return what the command line has said, but for some options."""
    words: list[str] = []
    said = _said(context)
    for option in context.command.params:
        if option.name not in said or option.name in without:
            continue
        value = context.params[option.name or ""]
        if isinstance(value, bool):
            words.append(option.opts[0] if value else option.secondary_opts[0])
        else:
            for item in value if isinstance(value, list | tuple) else [value]:
                words += [option.opts[0], str(item)]
    return tuple(words)
