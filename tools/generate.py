"""Write text with a checkpoint.

    python tools/generate.py --load FOLDER --prompt "Once" --temperature 0.8 --top-k 40 --seed 1

Model and tokenizer are those recorded in the checkpoint; flags name tokenizer files that have
moved, or those of a model that was imported without. The continuation is a function of (checkpoint,
prompt, seed, flags): each token's random number is counted by its position.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any, get_args

import torch
from torch import Tensor

if not __package__:  # run as a file of a checkout
    import _checkout  # noqa: F401

from megatron.kernels import philox

from megatron.checkpoint.manifest import CheckpointError
from megatron.checkpoint.reader import Checkpoint, open_checkpoint
from megatron.checkpoint.run_state import config_of
from megatron.config.errors import UserError  # noqa: E402
from megatron.config.groups import DistributedConfig, TokenizerType
from megatron.config.metadata import KERNEL
from megatron.config.streams import escape_unencodable  # noqa: E402
from megatron.data.tokenizer import build_tokenizer
from megatron.distributed.logs import job_log
from megatron.distributed.setup import choose_device, read_launch
from megatron.model.arithmetic import padded_vocab_size
from megatron.model.gpt import GPTModel
from megatron.model.kernels import compute_dtype
from megatron.parallel.blocks import build_blocks


def load_model(checkpoint: Checkpoint, device: torch.device) -> GPTModel:
    """The checkpoint's model, weights rounded to the precision it was trained in (fp32 on a CPU for
    fp16).
    """
    config = config_of(checkpoint.state)
    dtype = compute_dtype(config.precision)
    if device.type == "cpu" and dtype == torch.float16:
        dtype = torch.float32
    # Reset kernel choices: the run made them for its own device.
    kernels: dict[str, Any] = {
        field.name: field.default
        for field in dataclasses.fields(config.model)
        if field.metadata.get("change") == KERNEL
    }
    shape = dataclasses.replace(config.model, **kernels)
    vocab = checkpoint.state["vocab_size"]
    model = GPTModel(
        shape,
        vocab_size=vocab,
        padded_vocab=padded_vocab_size(vocab, shape),
        dtype=dtype,
        seed=config.training.seed,
    )
    for block in build_blocks(model, device, training=False):
        for entry in block.entries:
            for box in entry.boxes:
                checkpoint.read(box, entry.view(block.weight))
    return model


def choose(logits: Tensor, uniform: float, *, temperature: float, top_k: int, top_p: float) -> int:
    """The next token from logits [v]: the greedy one at temperature 0, else where the sorted
    distribution passes `uniform` in [0, 1).

    top_k > 0 keeps that many most likely tokens, top_p < 1 the fewest whose probability reaches it
    (Holtzman et al. 2020).
    """
    if temperature == 0:
        return int(logits.argmax())
    probabilities, order = torch.softmax(logits.double() / temperature, dim=-1).sort(
        descending=True, stable=True
    )
    if top_k > 0:
        probabilities = probabilities[:top_k]
    if top_p < 1:
        before = probabilities.cumsum(0) - probabilities
        probabilities = probabilities[before < top_p]
    cumulative = probabilities.cumsum(0)
    return int(order[min(int((cumulative <= uniform * cumulative[-1]).sum()), len(cumulative) - 1)])


def generate(
    model: GPTModel,
    prompt: list[int],
    *,
    tokens: int,
    seed: int,
    eod: int | None,
    temperature: float,
    top_k: int,
    top_p: float,
) -> list[int]:
    """Up to `tokens` ids after the prompt, until eod. The model sees at most its longest sequence;
    there is no cache: each token is a full pass.
    """
    device = model.embedding.word.weight.device
    key, ids = philox.key(seed, "generate"), list(prompt)
    for position in range(tokens):
        window = torch.tensor([ids[-model.config.max_position_embeddings :]], device=device)
        word = philox.philox4x32([torch.tensor([c]) for c in (position, 0, 0, 0)], key)[0].item()
        ids.append(
            choose(
                model.logits(window)[0, -1].float().cpu(),
                word / 2**32,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
            )
        )
        if ids[-1] == eod:
            break
    return ids[len(prompt) :]


def parse(argv: list[str]) -> argparse.Namespace:
    """Flags, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--load", required=True, help="folder that --save wrote to")
    parser.add_argument("--ckpt-step", type=int, help="iteration to load; default: the latest")
    parser.add_argument("--prompt", default="", help="text to continue; default: start a document")
    parser.add_argument("--num-tokens", type=int, default=200, help="most tokens to write")
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="0 takes the most likely token"
    )
    parser.add_argument(
        "--top-k", type=int, default=0, help="choose among this many most likely tokens; 0: all"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="choose among the fewest tokens that reach this probability",
    )
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--tokenizer-type", choices=get_args(TokenizerType))
    parser.add_argument("--tokenizer-model", help="where the tokenizer file lies now")
    parser.add_argument("--vocab-file", help="where the GPT-2 BPE vocabulary lies now")
    parser.add_argument("--merge-file", help="where the GPT-2 BPE merges lie now")
    flags = parser.parse_args(argv)
    for name, good, what in (
        ("num_tokens", flags.num_tokens > 0, "above 0"),
        ("temperature", flags.temperature >= 0, "0 or more"),
        ("top_k", flags.top_k >= 0, "0 or more"),
        ("top_p", 0 < flags.top_p <= 1, "above 0 and at most 1"),
    ):
        if not good:
            parser.error(f"--{name.replace('_', '-')} {getattr(flags, name)}: give a number {what}")
    return flags


def main(argv: list[str] | None = None) -> int:
    """Load, generate, print prompt and continuation."""
    escape_unencodable()
    flags = parse(sys.argv[1:] if argv is None else argv)
    try:
        return write_text(flags)
    except (UserError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 2


def write_text(flags: argparse.Namespace) -> int:
    """Load, generate, print. Raises UserError for a checkpoint or tokenizer that cannot be used."""
    with job_log():
        checkpoint = open_checkpoint(flags.load, flags.ckpt_step)
    if checkpoint is None:
        raise CheckpointError(f"--load {flags.load}: no checkpoint there")
    names = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
    given = {name: value for name in names if (value := getattr(flags, name)) is not None}
    data = config_of(checkpoint.state).data
    if data.tokenizer_type is None:  # imported without one
        if flags.tokenizer_type is None and not flags.vocab_file:
            raise UserError(f"--tokenizer-type is missing: {checkpoint.path} names no tokenizer")
        # of the NullTokenizer without the end-of-document id
        is_null = flags.tokenizer_type == "NullTokenizer"
        given["vocab_size"] = checkpoint.state["vocab_size"] - is_null
    tokenizer = build_tokenizer(dataclasses.replace(data, **given))
    known = checkpoint.state.get("tokenizer")  # none of an imported model
    if known is not None and tokenizer.fingerprint != known:
        raise CheckpointError(
            f"{checkpoint.path}: was trained with another tokenizer than {tokenizer.name}; "
            "name its files with --tokenizer-model, or --vocab-file and --merge-file"
        )
    device, _ = choose_device(read_launch(), DistributedConfig())
    model = load_model(checkpoint, device)
    prompt = tokenizer.encode(flags.prompt) or [tokenizer.eod]
    out = generate(
        model,
        prompt,
        tokens=flags.num_tokens,
        seed=flags.seed,
        eod=tokenizer.eod,
        temperature=flags.temperature,
        top_k=flags.top_k,
        top_p=flags.top_p,
    )
    print(tokenizer.decode([token for token in (*prompt, *out) if token != tokenizer.eod]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
