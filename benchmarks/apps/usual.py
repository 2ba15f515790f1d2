"""Write the embedded model with the usual converter of each layout, and keep the bytes of its files.

    python -m benchmarks.apps.usual --python INTERPRETER --scripts DIR [--apps NAME ...]

INTERPRETER has the packages of the chosen apps' converters: ctranslate2, optimum-onnx, optimum-intel,
openai-whisper, transformers. optimum-onnx and optimum-intel need environments of their own. DIR has what no
package has: `export-onnx.py` of k2-fsa/sherpa-onnx, `convert-h5-to-ggml.py` and the program `quantize` of
ggml-org/whisper.cpp, and `scripts/quantize.py` of huggingface/transformers.js before version 4.

Only the files that the app loads are counted. Writes `results/apps.json`; `layouts.py` measures ours.
"""

import argparse
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from whisperport.model.checkpoint import load_checkpoint
from whisperport.speech.data.embedded_model import unpack_model

from ..peers.models import write_openai
from ..record import record, recorded

VERSION = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
TASK = "automatic-speech-recognition-with-past"
SPEECH = (
    "distil-small.en"  # of the names that export-onnx.py knows, one that is read from a local file
)
# The exporter that is torch's default in the versions for which export-onnx.py was written.
TRACED = """\
import functools, runpy, sys, torch
torch.onnx.export = functools.partial(torch.onnx.export, dynamo=False)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

Run = Callable[..., str]


def faster_whisper(run: Run, source: Path, out: Path, scripts: Path) -> None:
    copied = ("--copy_files", "tokenizer.json", "preprocessor_config.json")
    for precision, name in {"fp32": "float32", "fp16": "float16", "w8": "int8"}.items():
        places = ("--model", source, "--output_dir", out / precision)
        run("ct2-transformers-converter", *places, "--quantization", name, *copied)


def openvino_genai(run: Run, source: Path, out: Path, scripts: Path) -> None:
    for precision, name in {"fp32": "fp32", "fp16": "fp16", "w8": "int8"}.items():
        options = ("--model", source, "--task", TASK, "--weight-format", name)
        run("optimum-cli", "export", "openvino", *options, out / precision)


def transformers_js(run: Run, source: Path, out: Path, scripts: Path) -> None:
    run("optimum-cli", "export", "onnx", "--model", source, "--task", TASK, out / "fp32")
    graphs = [out / "fp32" / f"{name}.onnx" for name in ("encoder_model", "decoder_model_merged")]
    for path in set((out / "fp32").glob("*.onnx*")) - set(graphs):
        path.unlink()  # decoders whose weights the merged one has as well
    for precision, mode in {"fp16": "fp16", "w8": "q8"}.items():
        without = shutil.ignore_patterns("*.onnx")
        made = shutil.copytree(out / "fp32", out / precision, ignore=without)
        places = ("--input_folder", out / "fp32", "--output_folder", made)
        run("python", "-m", "scripts.quantize", *places, "--modes", mode, cwd=scripts)


def sherpa_onnx(run: Run, source: Path, out: Path, scripts: Path) -> None:
    write_openai(load_checkpoint(str(source)), out / "distil-small-en-original-model.bin")
    run("python", "-c", TRACED, scripts / "export-onnx.py", "--model", SPEECH, cwd=out)
    for precision, end in {"fp32": ".onnx", "w8": ".int8.onnx"}.items():
        (out / precision).mkdir()
        for name in (f"encoder{end}", f"decoder{end}", "tokens.txt"):
            shutil.copy(out / f"{SPEECH}-{name}", out / precision)


def whisper_cpp(run: Run, source: Path, out: Path, scripts: Path) -> None:
    # The script reads two files that transformers no longer writes, and openai-whisper's filters.
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    (source / "vocab.json").write_text(json.dumps(tokenizer["model"]["vocab"]), encoding="utf-8")
    (source / "added_tokens.json").write_text("{}")
    packages = run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    for precision in ("fp16", "w8"):
        (out / precision).mkdir()
    run("python", scripts / "convert-h5-to-ggml.py", source, packages, out / "fp16")
    files = (out / precision / "ggml-model.bin" for precision in ("fp16", "w8"))
    run(scripts / "quantize", *files, "q8_0")


# App -> the converter, the package whose version matters, and the function that runs it.
CONVERTERS = {
    "faster-whisper": ("ct2-transformers-converter", "ctranslate2", faster_whisper),
    "openvino-genai": ("optimum-cli export openvino", "optimum-intel", openvino_genai),
    "sherpa-onnx": ("export-onnx.py", "openai-whisper", sherpa_onnx),
    "transformers.js": ("optimum-cli export onnx, quantize.py", "optimum-onnx", transformers_js),
    "whisper.cpp": ("convert-h5-to-ggml.py, quantize", "transformers", whisper_cpp),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--scripts", type=Path, required=True)
    parser.add_argument("--apps", nargs="+", choices=CONVERTERS, default=list(CONVERTERS))
    parser.add_argument("--work", type=Path, default=Path("build/usual"))
    chosen = parser.parse_args()
    programs = chosen.python.absolute().parent

    def run(program: str | Path, *arguments: str | Path, cwd: Path | None = None) -> str:
        command = [programs / program, *arguments]
        ended = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise ChildProcessError(ended.stderr.strip().rpartition("\n")[2])
        return ended.stdout

    result = recorded("apps", "usual") or {"what": "files of the usual converters", "apps": {}}
    for app in chosen.apps:
        result["apps"][app] = measured(app, run, chosen.work.absolute(), chosen.scripts.absolute())
        print(app, result["apps"][app], flush=True)
        record("apps", "usual", result)


def measured(app: str, run: Run, work: Path, scripts: Path) -> dict[str, Any]:
    """Return the bytes of each precision that a converter wrote, and the last line of its failure."""
    converter, package, convert = CONVERTERS[app]
    source, out = work / f"{app}-checkpoint", work / app
    for folder in (source, out):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    unpack_model(source)
    failed = {}
    try:
        convert(run, source, out, scripts)
    except (ChildProcessError, OSError) as error:
        failed = {"failed": str(error)}
    sizes = {
        folder.name: sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        for folder in sorted(out.iterdir())
        if folder.is_dir()
    }
    version = run("python", "-c", VERSION, package).strip()
    return {"converter": converter, package: version, "bytes": sizes, **failed}


if __name__ == "__main__":
    main()
