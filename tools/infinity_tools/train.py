"""`infinity train`: its options, and how they become settings."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Annotated, Any

import typer

from infinity.cli_errors import Command, Version, at_most, failures, finite, setting
from infinity_tools.preset_list import list_presets

_MODEL, _DATA, _STATE, _OPTIMIZER, _OUTPUT = "Model", "Data", "State on NVMe", "Optimizer", "Output"


def train(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Option(
            help="A preset (`--model list` shows them), a config.json of transformers, or a folder that "
            "save_pretrained wrote, whose weights are streamed in.",
            rich_help_panel=_MODEL,
        ),
    ] = "llama-100m",
    strict: Annotated[
        bool,
        typer.Option(
            help="Refuse a folder that lacks weights of the model or has others. --no-strict: initialise what is "
            "missing and pass over what is unexpected.",
            rich_help_panel=_MODEL,
        ),
    ] = True,
    dtype: Annotated[
        str,
        typer.Option(
            help="bf16: compute in bf16, reduce and update in fp32. fp32. auto: bf16 where the processor has it.",
            rich_help_panel=_MODEL,
        ),
    ] = "auto",
    lora: Annotated[
        str | None,
        typer.Option(
            metavar="r=16",
            help="Train adapters of this rank beside the matrices of the layers, and freeze the model; r=16 may be "
            "followed by ,alpha=32 and ,dropout=0.05 and ,targets=q_proj+v_proj. What is not said: alpha 2 r, no "
            "dropout, all linear layers but the head. `infinity export` writes an adapter of peft.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    activation_checkpointing: Annotated[
        bool, typer.Option(help="Keep only the inputs of layers; compute them twice.", rich_help_panel=_MODEL)
    ] = False,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="What to train on, repeatable. A data set: a parquet, jsonl, json, csv or arrow file, a folder of "
            "such files, or one that save_to_disk of `datasets` wrote. Or plain text: a file, or a folder of files, "
            "whose tokens are bytes unless the model has a tokenizer.json. [default: the sources of Python's standard "
            "library]",
            rich_help_panel=_DATA,
        ),
    ] = None,
    split: Annotated[
        str,
        typer.Option(
            help="Of a data set that has several. [default: train, or the only one]",
            rich_help_panel=_DATA,
            show_default=False,
        ),
    ] = "",
    text_column: Annotated[
        str,
        typer.Option(
            help="Column of a data set to train on, of texts or chats. [default: messages; or prompt and completion; "
            "or text; or the only column of text]",
            rich_help_panel=_DATA,
            show_default=False,
        ),
    ] = "",
    loss_on: Annotated[
        str,
        typer.Option(
            help="completions: of prompt and completion the completion, of a chat what the assistant says. all: every "
            "token.",
            rich_help_panel=_DATA,
        ),
    ] = "completions",
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder of the tokenizer and its chat template. [default: --model's]", rich_help_panel=_DATA),
    ] = None,
    epochs: Annotated[
        float | None,
        typer.Option(
            help="Train on every sequence of a data set so often, instead of --steps; each epoch in another order.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    eval_data: Annotated[
        list[Path] | None,
        typer.Option(help="What is held out, to show the loss on it; as --data.", rich_help_panel=_DATA),
    ] = None,
    eval_split: Annotated[
        str,
        typer.Option(
            help="Split that is held out, of --eval-data or else of --data. [default: of --eval-data validation, test, "
            "or the only one]",
            rich_help_panel=_DATA,
            show_default=False,
        ),
    ] = "",
    eval_every: Annotated[
        int,
        typer.Option(min=0, help="Evaluate every so many steps, not only after the last one.", rich_help_panel=_DATA),
    ] = 0,
    batch_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens per step, over all ranks.", rich_help_panel=_DATA)
    ] = 512,
    micro_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens that a rank computes at a time. Each layer runs the whole batch in slices of so many tokens "
            "before the next layer starts, and computes them again in backward: memory for activations is that of one "
            "slice and the inputs of layers, and a larger --batch-tokens moves no more state. [default: all at once]",
            rich_help_panel=_DATA,
        ),
    ] = None,
    loss_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens whose logits and loss a rank computes at a time, twice: memory for large vocabularies is that "
            "of so many. [default: as many as layers do]",
            rich_help_panel=_DATA,
        ),
    ] = None,
    seq: Annotated[
        int,
        typer.Option(
            min=2,
            help="Tokens per sequence. Texts of a data set are laid end to end and cut; of chats and completions as "
            "many as fit are in a sequence; what is longer is cut off at its end.",
            rich_help_panel=_DATA,
        ),
    ] = 256,
    seed: Annotated[
        int | None,
        typer.Option(
            callback=setting("run.seed"), help="Of first values and of batches. [default: 0]", rich_help_panel=_DATA
        ),
    ] = None,
    nvme: Annotated[
        list[Path] | None,
        typer.Option(
            help="Folder for the state; repeat it to spread the state over several drives. [default: OUT/nvme]",
            rich_help_panel=_STATE,
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            callback=setting("memory.host_bytes"),
            help="Size of the host cache per rank, such as 512MiB. [default: a quarter of what is free]",
            rich_help_panel=_STATE,
        ),
    ] = None,
    page_bytes: Annotated[
        str | None,
        typer.Option(
            callback=setting("memory.page_bytes"), help="Largest page. [default: derived]", rich_help_panel=_STATE
        ),
    ] = None,
    state_format: Annotated[
        str | None,
        typer.Option(
            callback=setting("state.format"),
            help="fp32: 14 bytes per bf16 parameter. split: 12.125, the same bits. bf16-moments: 8.125. 8bit: 6.1875. "
            "[default: fp32]",
            rich_help_panel=_STATE,
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            callback=setting("storage.engine"),
            help="auto, io_uring or threads. [default: auto]",
            rich_help_panel=_STATE,
        ),
    ] = None,
    update: Annotated[
        str | None,
        typer.Option(
            callback=setting("update.schedule"),
            help="auto, in_backward, in_forward or after_backward. [default: auto]",
            rich_help_panel=_STATE,
        ),
    ] = None,
    checkpoint_every: Annotated[
        int,
        typer.Option(
            min=0,
            help="Make the state durable every so many steps, not only at the end of the run, whether that is the last "
            "step or a signal. With --keep never there is no checkpoint at the end.",
            rich_help_panel=_STATE,
        ),
    ] = 0,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="[auto|RUN]",
            help="Go on from the newest checkpoint on the folders, or from that of a run, by its id. --resume auto: begin "
            "anew where there is none.",
            rich_help_panel=_STATE,
        ),
    ] = None,
    override: Annotated[
        bool,
        typer.Option(
            "--override",
            help="With --resume: --lr, --weight-decay, --warmup-steps, --lr-steps and --max-grad-norm hold where they "
            "are given. Without, a run goes on with those that it was begun with.",
            rich_help_panel=_STATE,
        ),
    ] = False,
    resume_path: Annotated[
        list[Path] | None,
        typer.Option(
            help="With --resume: folder of the run to go on from, if it is not one of --nvme; repeat it as --nvme was.",
            rich_help_panel=_STATE,
        ),
    ] = None,
    resume_step: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="With --resume: from the checkpoint of this step; later ones are removed.",
            rich_help_panel=_STATE,
        ),
    ] = None,
    activations: Annotated[
        str | None,
        typer.Option(
            callback=setting("activations.tier"),
            help="Where inputs of layers wait for backward: device, host (from a GPU) or nvme. [default: device]",
            rich_help_panel=_STATE,
        ),
    ] = None,
    retained_checkpoints: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Checkpoints to keep; each takes the size of the state once more. 0, with --keep never: no room for any. "
            "[default: 1]",
            rich_help_panel=_STATE,
        ),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            callback=setting("run.keep"),
            help="What is left on NVMe at the end. auto: a run that has a checkpoint; always; never. [default: auto]",
            rich_help_panel=_STATE,
        ),
    ] = None,
    steps: Annotated[
        int,
        typer.Option(min=1, help="Train up to this step, counted from the run's first.", rich_help_panel=_OPTIMIZER),
    ] = 20,
    lr: Annotated[
        float | None,
        typer.Option(
            min=0, callback=finite, help="Highest learning rate of AdamW. [default: 3e-4]", rich_help_panel=_OPTIMIZER
        ),
    ] = None,
    warmup_steps: Annotated[
        int | None,
        typer.Option(min=0, help="Steps in which the rate rises. [default: 4]", rich_help_panel=_OPTIMIZER),
    ] = None,
    lr_steps: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Step at which the rate's cosine reaches its end, a tenth. [default: 0, the run's first --steps]",
            rich_help_panel=_OPTIMIZER,
        ),
    ] = None,
    weight_decay: Annotated[
        float | None,
        typer.Option(min=0, callback=finite, help="Of AdamW. [default: 0.1]", rich_help_panel=_OPTIMIZER),
    ] = None,
    max_grad_norm: Annotated[
        float | None,
        typer.Option(
            help="Clip the global norm of the gradients; updates then wait for the end of backward. [default: off]",
            rich_help_panel=_OPTIMIZER,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of summary.json, summary.png and steps.jsonl; one with those of an earlier run is refused "
            "without --resume. [default: runs/TIME]",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    log: Annotated[
        list[str] | None,
        typer.Option(help="Log figures of steps also to tensorboard or wandb; repeatable.", rich_help_panel=_OUTPUT),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Serve Prometheus metrics of this node's ranks; 0: any port.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    metrics_host: Annotated[
        str,
        typer.Option(help="Address to serve them on, without authentication; 0.0.0.0 is all.", rich_help_panel=_OUTPUT),
    ] = "127.0.0.1",
    metrics_linger: Annotated[
        float,
        typer.Option(
            min=0,
            callback=at_most(10**6),
            help="Seconds to go on serving them after the summary is written.",
            rich_help_panel=_OUTPUT,
        ),
    ] = 0.0,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Write what happened when to this file, as JSON for ui.perfetto.dev; other ranks add their number.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON and nothing else.", rich_help_panel=_OUTPUT)
    ] = False,
    config: Annotated[
        Path | None, typer.Option(help="Settings as TOML (docs/settings.md); options override it.")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Start so many ranks on this machine, as torchrun does.")
    ] = None,
    threads: Annotated[int, typer.Option(min=0, max=4096, help="Threads that compute. 0: torch decides.")] = 0,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
    version: Version = False,
) -> None:
    """Train a causal language model whose parameters and optimizer state live on NVMe.

    On several GPUs or nodes: `--nproc 8`, or `torchrun --nproc-per-node 8 -m infinity_tools train …`.
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
                f"--resume {resume!r}: leave it without a value, or say --resume auto, or the id of a run (`infinity "
                "store ls` lists them)"
            )
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ConfigError(
                f"--max-grad-norm {max_grad_norm:g} must be above 0; leave it out to train without clipping"
            )
        if retained_checkpoints == 0 and (keep != "never" or checkpoint_every):
            raise ConfigError(
                "--retained-checkpoints 0 leaves no room for the checkpoint at the end, or for those of --checkpoint-every; add "
                "--keep never and leave --checkpoint-every out, or keep 1"
            )
        if retained_checkpoints and keep == "never" and not checkpoint_every:
            raise ConfigError(
                f"--retained-checkpoints {retained_checkpoints} with --keep never: there is no checkpoint to retain; name "
                "--checkpoint-every, or leave one of them out"
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
                    raise ConfigError(f"{option} {value} needs --resume")
            if override:
                raise ConfigError("--override needs --resume")
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
